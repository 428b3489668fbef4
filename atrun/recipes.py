"""Recipes as frozen values, every one by its name: the papers' (here attention transfer, MAE after its
pre-training, AugReg; the others are collected from the files beside), and this project's.

The tables hold names and what makes a recipe, called with `name`; `published` calls it."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial

from atlib._util import require_known
from atlib.plan import Plan
from atlib.train.recipe import Recipe
from atrun.data.transforms import Augmentation
from atrun.deit_recipes import DEIT, OTHER_NETWORKS, PATCH_CONV
from atrun.detection_recipes import DETECTION
from atrun.method import Method
from atrun.published import ERASED, LAST_BATCH, POOLED, RAND_AUGMENT, SCRATCH, TUNED, Published
from atrun.unlabelled_recipes import AFTER_PRETRAINING, PRETRAINING

_PAPER = "arXiv 2411.09702, table of recipes"
_CODE = "github.com/alexlioralexli/attention-transfer at 26963e8"
_LAST_LAYERS = (
    "The published PyTorch code does not hand `--end_layer` on to the model, whose own default, -3, stands:"
    " read to the letter, its command transfers the first 21 of 24 layers. The paper's number is kept here."
)
_MAIN_RESULT = (
    "λ = 3 is the main result's. All other results of the paper have 1, on other data and with other teachers"
    " too: `--transfer_weight 1`."
)
_FLOAT32 = "Mixed precision is commented out in the published code, so its maps are computed in float32."


def _copy(*, name: str) -> Published:
    return Published(
        name,
        f"{_PAPER}; random erasing: {_CODE}, README.md, Attention Copy",
        model="vit_large_patch16_224",
        options=POOLED,
        method=Method.COPY,
        plan=Plan(),
        teacher="vit_large_patch16_224.mae",
        augmentation=ERASED,
        recipe=Recipe(
            **TUNED, epochs=100, batch_size=2048, base_lr=1e-3, min_lr=2e-3, layer_decay=0.75, ema=0.9999
        ),
        oddities=(
            (
                "The smallest learning rate, 2e-3, is above the base rate, 1e-3. The base rate is per 256"
                " images, the smallest is absolute: at batch 2048 the peak is 8e-3 and the schedule falls to"
                " a quarter of it. At a batch below 512 the peak is below 2e-3, and the rate rises after the"
                " warm-up."
            ),
            "Layer decay slows the first layers, though a student of random weights has nothing to protect.",
            (
                "The published code counts this student's layers one higher than MAE's code does: its last"
                " block learns at the head's rate and its embeddings at 0.75 to the power of 24. Here, as in"
                " MAE and timm, the last block has 0.75 of the head's rate and the embeddings 0.75 to the"
                " power of 25."
            ),
            _LAST_LAYERS,
            _FLOAT32,
            LAST_BATCH,
        ),
    )


def _distill(*, name: str) -> Published:
    return Published(
        name,
        f"{_PAPER}; random erasing: {_CODE}, README.md, Attention Distillation",
        model="vit_large_patch16_224",
        options=POOLED,
        method=Method.DISTILL,
        teacher="vit_large_patch16_224.mae",
        plan=Plan(how="distill", layers=range(18)),
        drop_path=0.2,
        augmentation=ERASED,
        recipe=Recipe(**SCRATCH, epochs=200, batch_size=2048, ema=0.9999, transfer_weight=3.0),
        oddities=(
            (
                "The paper's schedule ends at 0; the command leaves the smallest rate at the code's default,"
                " 1e-6."
            ),
            _MAIN_RESULT,
            "In training the teacher drops the student's branches, image by image (`Plan.share_drop_path`).",
            _LAST_LAYERS,
            _FLOAT32,
            LAST_BATCH,
        ),
    )


_OF_VIT_LARGE = (
    "The paper prints its recipes for ViT-L alone, and reports ViT-B and ViT-H beside it: nothing else was"
    " found for this size, so ViT-L's values stand here."
)
_WEIGHT_1 = "λ is 1: the paper has 3 for its main result alone, and 1 for all other results."


def _copy_of(size: str, patch: int, *, name: str) -> Published:
    vit = f"vit_{size}_patch{patch}_224"
    large = _copy(name=name)
    oddities = (_OF_VIT_LARGE, *(oddity for oddity in large.oddities if oddity is not _LAST_LAYERS))
    return replace(large, model=vit, teacher=f"{vit}.mae", oddities=oddities)


def _distill_of(size: str, patch: int, layers: int, depth: int, *, name: str) -> Published:
    vit = f"vit_{size}_patch{patch}_224"
    large = _distill(name=name)
    return replace(
        large,
        model=vit,
        teacher=f"{vit}.mae",
        plan=Plan(how="distill", layers=range(layers)),
        recipe=replace(large.recipe, transfer_weight=1.0),
        oddities=(
            _OF_VIT_LARGE,
            f"Not found: how many layers are distilled. {layers} of {depth} are ViT-L's share, 18 of 24.",
            _WEIGHT_1,
            *(one for one in large.oddities if one not in (_LAST_LAYERS, _MAIN_RESULT)),
        ),
    )


def _partial_copy(*, name: str) -> Published:
    whole = _copy(name=name)
    return replace(
        whole,
        source=f"{_PAPER}: β2 of partial copies, the rest as Copy; layers: {_CODE}, models_dual_vit.py",
        recipe=replace(whole.recipe, betas=(0.9, 0.95)),
        plan=Plan(layers=range(21)),
        oddities=(
            (
                "The paper varies the number of layers. 21 stands here because it is what the published code"
                " copies by default (`end_layer=-3`); name others (`plan.layers`) for another point of the"
                " paper's study."
            ),
            *(oddity for oddity in whole.oddities if oddity is not _LAST_LAYERS),
        ),
    )


def _mae_fine_tune(
    size: str,
    patch: int,
    drop_path: float,
    of_table_9: str,
    base_lr: float = 1e-3,
    layer_decay: float = 0.75,
    epochs: int = 50,
    *,
    name: str,
) -> Published:
    vit = f"vit_{size}_patch{patch}_224"
    return Published(
        name,
        "github.com/facebookresearch/mae at 2f170f2, FINETUNE.md; compare arXiv 2111.06377, table 9",
        model=vit,
        options=POOLED,
        method=Method.FINE_TUNE,
        teacher=f"{vit}.mae",
        drop_path=drop_path,
        augmentation=ERASED,
        recipe=Recipe(
            **TUNED, epochs=epochs, batch_size=1024, base_lr=base_lr, min_lr=1e-6, layer_decay=layer_decay
        ),
        oddities=(
            of_table_9,
            "Random erasing and the smallest rate, 1e-6, are in the command and its code only.",
            (
                "Layer decay: MAE's code counts the norm before the head to the head. So does timm here, as"
                " average pooling makes it `fc_norm`; with a class token timm counts it to the last block."
            ),
            (
                "The published code draws the new head's weights with a deviation of 2e-5; here they start as"
                " timm's `reset_classifier` leaves them."
            ),
            LAST_BATCH,
        ),
    )


def _mae_scratch(size: str, patch: int, drop_path: float, epochs: int, *, name: str) -> Published:
    return Published(
        name,
        "arXiv 2111.06377, appendix A.2, table 11",
        model=f"vit_{size}_patch{patch}_224",
        options=POOLED,
        method=Method.SCRATCH,
        drop_path=drop_path,
        augmentation=RAND_AUGMENT,
        recipe=Recipe(**SCRATCH, epochs=epochs, batch_size=4096, ema=0.9999),
        oddities=(
            (
                "The table prints no smallest rate and no pooling. Here the schedule ends at 0 and patches"
                " are averaged, as in the fine-tuning code, which the authors say trains from scratch too"
                " (issue 28 of their repository)."
            ),
            "The paper reports averaged weights: plain ones are 1.1 (ViT-L) and 2.2 (ViT-H) points lower.",
        ),
    )


# The augmentations of AugReg that its code chooses by model size: RandAugment and mixup's alpha.
_LIGHT_1, _MEDIUM_2 = ("rand-m0-n2-p1", 0.0), ("rand-m15-mmax15-n2-p1", 0.5)
_STEPS_PER_EPOCH = 313  # of 4,096 images of ImageNet-1k


def _augreg(size: str, rand_augment: str, mixup: float, *, name: str) -> Published:
    return Published(
        name,
        "arXiv 2106.10270; github.com/google-research/big_vision at 21bd6eb, configs/vit_i1k.py",
        model=f"vit_{size}_patch16_224",
        method=Method.SCRATCH,
        augmentation=Augmentation(
            scale=(0.05, 1.0),
            rand_augment=rand_augment,
            interpolation="bilinear",
            mean=(0.5,) * 3,
            std=(0.5,) * 3,
        ),
        recipe=Recipe(
            epochs=300,
            warmup_epochs=10_000 / _STEPS_PER_EPOCH,
            batch_size=4096,
            base_lr=1e-3 * 256 / 4096,
            weight_decay=0.1,
            label_smoothing=0.0,
            mixup=mixup,
            clip=1.0,
        ),
        oddities=(
            "The warm-up is 10,000 steps, a tenth of all.",
            "The code does not multiply its weight decay, 1e-4, by the rate, AdamW does: 1e-4 / 1e-3.",
            (
                "The code chooses one augmentation for a model size, a compromise between 30 and 300 epochs;"
                " the paper tries seven, with and without dropout and stochastic depth of 0.1, which helped"
                " the larger models there."
            ),
            (
                "RandAugment's operations are timm's, at the magnitude of the code's, each always applied;"
                " `light1` has magnitude 0, which is not nothing."
            ),
            (
                "The code keeps 1 % of the training images for its own validation, mixes neighbours of a"
                " batch with the larger share first, and has a tanh layer before the head; here all images"
                " train, the mixing is timm's and the head is one layer."
            ),
        ),
    )


_BASE_BY_TABLE_9 = (
    "Table 9 prints base rate 1e-3 and layer decay 0.75 where the command has 5e-4 and 0.65: the published"
    " weights were pre-trained on normalised pixels, and the authors say they want other values."
)
_DROP_BY_TABLE_9 = "Table 9 prints a drop path of {} where the command has {}."
# The papers' recipes that the command line runs; with its `pretrain` those of `PRETRAINING`.
PAPERS: Mapping[str, Callable[..., Published]] = {
    "copy-vit-large": _copy,
    "distill-vit-large": _distill,
    "partial-copy-vit-large": _partial_copy,
    "copy-vit-base": partial(_copy_of, "base", 16),
    "copy-vit-huge": partial(_copy_of, "huge", 14),
    "distill-vit-base": partial(_distill_of, "base", 16, 9, 12),
    "distill-vit-huge": partial(_distill_of, "huge", 14, 24, 32),
    "mae-fine-tune-vit-base": partial(
        _mae_fine_tune, "base", 16, 0.1, _BASE_BY_TABLE_9, base_lr=5e-4, layer_decay=0.65, epochs=100
    ),
    "mae-fine-tune-vit-large": partial(_mae_fine_tune, "large", 16, 0.2, _DROP_BY_TABLE_9.format(0.1, 0.2)),
    "mae-fine-tune-vit-huge": partial(_mae_fine_tune, "huge", 14, 0.3, _DROP_BY_TABLE_9.format(0.2, 0.3)),
    "mae-scratch-vit-base": partial(_mae_scratch, "base", 16, drop_path=0.1, epochs=300),
    "mae-scratch-vit-large": partial(_mae_scratch, "large", 16, drop_path=0.2, epochs=200),
    "mae-scratch-vit-huge": partial(_mae_scratch, "huge", 14, drop_path=0.2, epochs=200),
    **PRETRAINING,
    **AFTER_PRETRAINING,
    **DEIT,
    **OTHER_NETWORKS,
    "augreg-vit-tiny": partial(_augreg, "tiny", *_LIGHT_1),
    "augreg-vit-small": partial(_augreg, "small", *_MEDIUM_2),
    "augreg-vit-base": partial(_augreg, "base", *_MEDIUM_2),
    "augreg-vit-large": partial(_augreg, "large", *_MEDIUM_2),
    **DETECTION,
}
# Those whose network the command line does not know: `atlib.train.train` takes their recipe.
FOR_PYTHON: Mapping[str, Callable[..., Published]] = PATCH_CONV


# --- This project's own recipes, and every recipe by its name ---

# As `Images` normalises both; generated data are not augmented, CIFAR-10 as `crop_and_flip` does it.
_PLAIN = Augmentation(32, crop="centre", flip=0.0, crop_pct=1.0, mean=(0.5,) * 3, std=(0.25,) * 3)


def _find(method: Method, lr: float, *, name: str, **chosen) -> Published:
    """The best trial in the records, with which `tests/run/test_published.py` compares every value."""
    return Published(
        name,
        "this project, the best that a search found on the validation split: results/transfer/find.jsonl",
        model="glyphs",
        method=method,
        plan=Plan(how=method) if method.transfers else None,
        augmentation=_PLAIN,
        recipe=Recipe(epochs=62.5, warmup_epochs=6.25, batch_size=128, base_lr=lr * 256 / 128, **chosen),
    )


def _cifar10_cpu(method: Method, lr: float, *, name: str) -> Published:
    """As `_find`, with a search for the learning rate alone."""
    return Published(
        name,
        "this project, the best that a search found on the validation split:"
        " results/transfer/cifar10-cpu.jsonl",
        model="glyphs",
        options={"num_classes": 10},
        method=method,
        plan=Plan(how=method) if method.transfers else None,
        augmentation=replace(_PLAIN, crop="padded", padding=4, flip=0.5),
        recipe=Recipe(epochs=15, warmup_epochs=1.5, batch_size=128, base_lr=lr * 256 / 128),
    )


_CIFAR10_CPU = {Method.SCRATCH: 2e-3, Method.FINE_TUNE: 2e-3, Method.COPY: 4e-3, Method.DISTILL: 8e-3}
OWN: Mapping[str, Callable[..., Published]] = {
    "find-scratch": partial(_find, Method.SCRATCH, lr=4e-3, weight_decay=0.1),
    "find-fine-tune": partial(_find, Method.FINE_TUNE, lr=5e-4, weight_decay=0.1),
    "find-copy": partial(_find, Method.COPY, lr=4e-3, weight_decay=0.3),
    "find-distill": partial(_find, Method.DISTILL, lr=8e-3, weight_decay=0.1, transfer_weight=10.0),
    **{f"cifar10-cpu-{method}": partial(_cifar10_cpu, method, lr) for method, lr in _CIFAR10_CPU.items()},
}


@cache
def published(name: str) -> Published:
    """A recipe by name: a paper's, or "SCALE-METHOD" as this project chose it, such as "find-copy".

    It is built when it is first asked for. Raises `ValueError` for an unknown name, with the close ones."""
    makers = {**PAPERS, **OWN, **FOR_PYTHON}
    require_known("recipe", name, makers)
    return makers[name](name=name)


def names() -> tuple[str, ...]:
    """The names of all recipes that `python -m atlib` runs: the papers' and ours. Nothing is built."""
    return *PAPERS, *OWN
