"""Recipes as frozen values: the papers' (attention transfer, MAE, DeiT and DeiT III), and this project's."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from atlib._util import require_known
from atlib.data.transforms import Augmentation
from atlib.plan import HOW, Plan
from atlib.train.recipe import Recipe

METHODS = ("scratch", "fine-tune", "copy", "distill")


@dataclass(frozen=True)
class Published:
    """A recipe as its source prints it, with its length in epochs and its rate per 256 images.

    source: paper with table or section, and the command where the authors print one. model: a timm name or a
    preset; options: its further constructor arguments. method: "scratch", "fine-tune", "copy" or "distill".
    teacher: the timm name whose weights the method starts from, None where a run must name one. plan: what is
    transferred, None where nothing is. drop_path: rate of stochastic depth in the last block. oddities: what
    a reader would take for a slip, and where we depart.
    """

    name: str
    source: str
    model: str
    method: str
    recipe: Recipe
    augmentation: Augmentation
    options: Mapping = field(default_factory=dict)
    teacher: str | None = None
    plan: Plan | None = None
    drop_path: float = 0.0
    oddities: tuple[str, ...] = ()


_PAPER = "arXiv 2411.09702, table of recipes"
_CODE = "github.com/alexlioralexli/attention-transfer at 26963e8"
_RAND_AUGMENT = Augmentation(rand_augment="rand-m9-mstd0.5-inc1")
_ERASED = replace(_RAND_AUGMENT, random_erasing=0.25)
# the mean of the patches, then a norm: what MAE's and attention transfer's PyTorch code build
_POOLED = {"global_pool": "avg"}
# mixed images, smoothed labels, and gradients as they are
_MIXED = {"label_smoothing": 0.1, "mixup": 0.8, "cutmix": 1.0, "clip": None}
# MAE's two recipes: fine-tuning, which Copy and DeiT share much of, and training from scratch, as Distill
_TUNED = {"warmup_epochs": 5, "betas": (0.9, 0.999), "weight_decay": 0.05, **_MIXED}
_SCRATCH = {"warmup_epochs": 20, "base_lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.3, **_MIXED}

_LAST_BATCH = "Here an epoch has one step more: the published code leaves its incomplete last batch out."
_LAST_LAYERS = (
    "The published PyTorch code does not hand `--end_layer` on to the model, whose own default, -3, stands:"
    " read to the letter, its command transfers the first 21 of 24 layers. The paper's number is kept here."
)
_FLOAT32 = "Mixed precision is commented out in the published code, so its maps are computed in float32."

_COPY = Published(
    "copy-vit-large",
    f"{_PAPER}; random erasing: {_CODE}, README.md, Attention Copy",
    model="vit_large_patch16_224",
    options=_POOLED,
    method="copy",
    plan=Plan(),
    teacher="vit_large_patch16_224.mae",
    augmentation=_ERASED,
    recipe=Recipe(
        **_TUNED, epochs=100, batch_size=2048, base_lr=1e-3, min_lr=2e-3, layer_decay=0.75, ema=0.9999
    ),
    oddities=(
        (
            "The smallest learning rate, 2e-3, is above the base rate, 1e-3. The base rate is per 256 images,"
            " the smallest is absolute: at batch 2048 the peak is 8e-3 and the schedule falls to a quarter of"
            " it. At a batch below 512 the peak is below 2e-3, and the rate rises after the warm-up."
        ),
        "Layer decay slows the first layers, though a student of random weights has nothing to protect.",
        (
            "The published code counts this student's layers one higher than MAE's code does: its last block"
            " learns at the head's rate and its embeddings at 0.75 to the power of 24. Here, as in MAE and"
            " timm, the last block has 0.75 of the head's rate and the embeddings 0.75 to the power of 25."
        ),
        _LAST_LAYERS,
        _FLOAT32,
        _LAST_BATCH,
    ),
)

_DISTILL = Published(
    "distill-vit-large",
    f"{_PAPER}; random erasing: {_CODE}, README.md, Attention Distillation",
    model="vit_large_patch16_224",
    options=_POOLED,
    method="distill",
    teacher="vit_large_patch16_224.mae",
    plan=Plan(how="distill", layers=range(18)),
    drop_path=0.2,
    augmentation=_ERASED,
    recipe=Recipe(**_SCRATCH, epochs=200, batch_size=2048, ema=0.9999, transfer_weight=3.0),
    oddities=(
        "The paper's schedule ends at 0; the command leaves the smallest rate at the code's default, 1e-6.",
        "In training the teacher drops the student's branches, image by image (`Plan.share_drop_path`).",
        _LAST_LAYERS,
        _FLOAT32,
        _LAST_BATCH,
    ),
)

_PARTIAL_COPY = replace(
    _COPY,
    name="partial-copy-vit-large",
    source=f"{_PAPER}: β2 of partial copies, the rest as Copy; layers: {_CODE}, models_dual_vit.py",
    recipe=replace(_COPY.recipe, betas=(0.9, 0.95)),
    plan=Plan(layers=range(21)),
    oddities=(
        (
            "The paper varies the number of layers. 21 stands here because it is what the published code"
            " copies by default (`end_layer=-3`); name others (`plan.layers`) for another point of the"
            " paper's study."
        ),
        *(each for each in _COPY.oddities if each is not _LAST_LAYERS),
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
) -> Published:
    vit = f"vit_{size}_patch{patch}_224"
    return Published(
        f"mae-fine-tune-vit-{size}",
        "github.com/facebookresearch/mae at 2f170f2, FINETUNE.md; compare arXiv 2111.06377, table 9",
        model=vit,
        options=_POOLED,
        method="fine-tune",
        teacher=f"{vit}.mae",
        drop_path=drop_path,
        augmentation=_ERASED,
        recipe=Recipe(
            **_TUNED, epochs=epochs, batch_size=1024, base_lr=base_lr, min_lr=1e-6, layer_decay=layer_decay
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
            _LAST_BATCH,
        ),
    )


def _mae_scratch(size: str, patch: int, drop_path: float, epochs: int) -> Published:
    return Published(
        f"mae-scratch-vit-{size}",
        "arXiv 2111.06377, appendix A.2, table 11",
        model=f"vit_{size}_patch{patch}_224",
        options=_POOLED,
        method="scratch",
        drop_path=drop_path,
        augmentation=_RAND_AUGMENT,
        recipe=Recipe(**_SCRATCH, epochs=epochs, batch_size=4096, ema=0.9999),
        oddities=(
            (
                "The table prints no smallest rate and no pooling. Here the schedule ends at 0 and patches"
                " are averaged, as in the fine-tuning code, which the authors say trains from scratch too"
                " (issue 28 of their repository)."
            ),
            "The paper reports averaged weights: plain ones are 1.1 (ViT-L) and 2.2 (ViT-H) points lower.",
        ),
    )


_DEIT_SCHEDULE = (
    "The published code changes the rate once per epoch, starts the warm-up at 1e-6 and counts the cosine"
    " from the first epoch; here it changes every step, starts near 0 and counts the cosine from the end of"
    " the warm-up."
)
_DEIT_AVERAGE = "Nothing is averaged here: DeiT's code averages (0.99996), but reports the plain weights."


def _deit(size: str) -> Published:
    return Published(
        f"deit-{size}",
        "arXiv 2012.12877, table 9; github.com/facebookresearch/deit, README_deit.md at 4da6691 and main.py"
        " at 0282d2a",
        model=f"deit_{size}_patch16_224",
        method="scratch",
        drop_path=0.1,
        augmentation=_ERASED,
        recipe=Recipe(**_TUNED, epochs=300, batch_size=1024, base_lr=2.5e-4, min_lr=1e-5, repeats=3),
        oddities=(
            "The paper's rate, 5e-4, is per 512 images. The smallest, 1e-5, is the code's default.",
            "Repeated augmentation: an epoch sees a third of the images, in three crops each.",
            _DEIT_SCHEDULE,
            _DEIT_AVERAGE,
            _LAST_BATCH,
        ),
    )


_DEIT3 = "arXiv 2204.07118; github.com/facebookresearch/deit at 4bd679b, README_revenge.md"
_LAMB = _TUNED | {"optimizer": "lamb", "clip": 1.0, "label_smoothing": 0.0, "binary": True, "repeats": 3}
_SAME_DROP = "The published model drops all blocks at one rate; timm's rises from 0 to it: half as much."


def _deit3(size: str, patch: int, lr: float, image_size: int, drop_path: float) -> Published:
    of_its_size = []
    if image_size != 224:
        of_its_size += [f"It trains at {image_size} pixels; `deit3-fine-tune-{size}` then brings it to 224."]
    if image_size % patch:
        of_its_size += [f"{image_size} is no multiple of the patch's {patch} pixels: the rest is not seen."]
    return Published(
        f"deit3-{size}",
        f"{_DEIT3}, ImageNet-1k, 800 epochs",
        model=f"deit3_{size}_patch{patch}_224",
        options={"init_values": 1e-4} | ({"img_size": image_size} if image_size != 224 else {}),
        method="scratch",
        drop_path=drop_path,
        augmentation=Augmentation(image_size, three_augment=True, color_jitter=0.3),
        recipe=Recipe(**_LAMB, epochs=800, batch_size=2048, base_lr=lr * 256 / 2048, min_lr=1e-5),
        oddities=(
            "The command prints absolute rates (`--unscale-lr`); per 256 images they are an eighth of it.",
            (
                "Weight decay is 0.05 in this 800-epoch command and 0.02 in the 400-epoch table of Touvron's"
                " thesis (HAL tel-03945782, table 6.1)."
            ),
            "The command does not clip, but its LAMB does so inside, at 1.0, as timm's does.",
            "Mixed targets are rounded up: in the binary cross-entropy both classes are fully present.",
            _SAME_DROP,
            _DEIT_SCHEDULE,
            _DEIT_AVERAGE,
            _LAST_BATCH,
            *of_its_size,
        ),
    )


def _deit3_fine_tune(size: str, patch: int, drop_path: float) -> Published:
    rates = {"base_lr": 1e-5 * 256 / 512, "min_lr": 1e-5, "weight_decay": 0.1}
    return Published(
        f"deit3-fine-tune-{size}",
        f"{_DEIT3}, fine-tuning at 224",
        model=f"deit3_{size}_patch{patch}_224",
        options={"init_values": 1e-4},
        method="fine-tune",
        drop_path=drop_path,
        augmentation=_RAND_AUGMENT,
        recipe=Recipe(epochs=20, batch_size=512, **(_TUNED | rates)),
        oddities=(
            "The peak, 1e-5, is the code's default for the smallest rate too: after warm-up the rate stays.",
            f"It starts from what `deit3-{size}` ends with: the run must name those weights as its teacher.",
            _SAME_DROP,
            _DEIT_AVERAGE,
            _LAST_BATCH,
        ),
    )


_BASE_BY_TABLE_9 = (
    "Table 9 prints base rate 1e-3 and layer decay 0.75 where the command has 5e-4 and 0.65: the published"
    " weights were pre-trained on normalised pixels, and the authors say they want other values."
)
_DROP_BY_TABLE_9 = "Table 9 prints a drop path of {} where the command has {}."
PUBLISHED: dict[str, Published] = {
    each.name: each
    for each in (
        _COPY,
        _DISTILL,
        _PARTIAL_COPY,
        _mae_fine_tune("base", 16, 0.1, _BASE_BY_TABLE_9, base_lr=5e-4, layer_decay=0.65, epochs=100),
        _mae_fine_tune("large", 16, 0.2, _DROP_BY_TABLE_9.format(0.1, 0.2)),
        _mae_fine_tune("huge", 14, 0.3, _DROP_BY_TABLE_9.format(0.2, 0.3)),
        _mae_scratch("base", 16, drop_path=0.1, epochs=300),
        _mae_scratch("large", 16, drop_path=0.2, epochs=200),
        _mae_scratch("huge", 14, drop_path=0.2, epochs=200),
        _deit("tiny"),
        _deit("small"),
        _deit("base"),
        _deit3("small", 16, lr=4e-3, image_size=224, drop_path=0.05),
        _deit3("base", 16, lr=3e-3, image_size=192, drop_path=0.2),
        _deit3("large", 16, lr=3e-3, image_size=192, drop_path=0.45),
        _deit3("huge", 14, lr=3e-3, image_size=160, drop_path=0.6),
        _deit3_fine_tune("base", 16, drop_path=0.2),
        _deit3_fine_tune("large", 16, drop_path=0.45),
        _deit3_fine_tune("huge", 14, drop_path=0.55),
    )
}


# --- This project's own recipes, as its tuning chose them; and every recipe by its name ---

# As `Images` normalises both; the built-in world is not augmented, CIFAR-10 as `crop_and_flip` does it.
_PLAIN = Augmentation(32, crop="centre", flip=0.0, crop_pct=1.0, mean=(0.5,) * 3, std=(0.25,) * 3)
_CROPPED = replace(_PLAIN, crop="padded", padding=4, flip=0.5)


def _find(method: str, trial: int, lr: float, **chosen) -> Published:
    return Published(
        f"find-{method}",
        "this project, the best that a search found on the validation split: "
        f"results/transfer/find.jsonl, {method}, trial {trial}",
        model="glyphs",
        method=method,
        plan=Plan(how=method) if method in HOW else None,
        augmentation=_PLAIN,
        recipe=Recipe(epochs=62.5, warmup_epochs=6.25, batch_size=128, base_lr=lr * 256 / 128, **chosen),
    )


def _cifar10_cpu(method: str) -> Published:
    return Published(
        f"cifar10-cpu-{method}",
        "this project, atlib.lab.scales, 'cifar10-cpu': fixed in advance",
        model="glyphs",
        options={"num_classes": 10},
        method=method,
        plan=Plan(how=method) if method in HOW else None,
        augmentation=_CROPPED,
        recipe=Recipe(epochs=15, warmup_epochs=1.5, batch_size=128, base_lr=2e-3),
    )


OWN: dict[str, Published] = {
    each.name: each
    for each in (
        _find("scratch", 22, lr=4e-3, weight_decay=0.1),
        _find("fine-tune", 7, lr=5e-4, weight_decay=0.1),
        _find("copy", 23, lr=4e-3, weight_decay=0.3),
        _find("distill", 165, lr=8e-3, weight_decay=0.1, transfer_weight=10.0),
        *(_cifar10_cpu(method) for method in METHODS),
    )
}


def published(name: str) -> Published:
    """A recipe by name: a paper's from `PUBLISHED`, or "SCALE-METHOD" as this project chose it, such as
    "find-copy". Raises `ValueError` for an unknown name, with the close ones."""
    require_known("recipe", name, names())
    return {**PUBLISHED, **OWN}[name]


def names() -> tuple[str, ...]:
    """The names of all recipes that `published` can give: the papers', and ours."""
    return *PUBLISHED, *OWN
