"""The recipes that papers have published, as frozen values: attention transfer, MAE, DeiT and DeiT III, each
with its source and its oddities; and those that this project chose for its own data."""

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

_LAST_BATCH = (
    "The published code leaves an epoch's incomplete last batch out; here it is a smaller step, so an epoch"
    " has one step more."
)
_LAST_LAYERS = (
    "The published PyTorch code does not hand `--end_layer` on to the model, whose own default, -3, stands:"
    " read to the letter, its command transfers the first 21 of 24 layers. The paper's number is kept here."
)
_FLOAT32 = "Mixed precision is commented out in the published code, so its maps are computed in float32."
_HEAD_INIT = (
    "The published code draws the new head's weights with a deviation of 2e-5; here they start as timm's"
    " `reset_classifier` leaves them."
)
_FINAL_NORM = (
    "Layer decay: MAE's code counts the norm before the head to the head. So does timm here, because average"
    " pooling makes it `fc_norm`; with a class token timm counts it to the last block."
)

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
        epochs=100,
        warmup_epochs=5,
        batch_size=2048,
        base_lr=1e-3,
        min_lr=2e-3,
        betas=(0.9, 0.999),
        weight_decay=0.05,
        layer_decay=0.75,
        ema=0.9999,
        **_MIXED,
    ),
    oddities=(
        (
            "The smallest learning rate, 2e-3, is above the base rate, 1e-3. The base rate is per 256 images,"
            " the smallest is absolute: at batch 2048 the peak is 8e-3 and the schedule falls to a quarter of"
            " it. At a batch below 512 the peak is below 2e-3, and the rate rises after the warm-up."
        ),
        (
            "Layer decay slows the first layers down although the student starts from random weights and has"
            " nothing there to protect."
        ),
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
    recipe=Recipe(
        transfer_weight=3.0,
        epochs=200,
        warmup_epochs=20,
        batch_size=2048,
        base_lr=1e-4,
        betas=(0.9, 0.95),
        weight_decay=0.3,
        ema=0.9999,
        **_MIXED,
    ),
    oddities=(
        (
            "The paper's schedule ends at 0; the published command names no smallest rate, and its code's"
            " default is 1e-6."
        ),
        (
            "In training the teacher drops the same branches of the same images as the student"
            " (`Plan.share_drop_path`)."
        ),
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
    size: str, patch: int, base_lr: float, layer_decay: float, drop_path: float, epochs: int, of_table_9: str
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
            epochs=epochs,
            warmup_epochs=5,
            batch_size=1024,
            base_lr=base_lr,
            min_lr=1e-6,
            weight_decay=0.05,
            layer_decay=layer_decay,
            **_MIXED,
        ),
        oddities=(
            of_table_9,
            "Random erasing and the smallest rate, 1e-6, are in the command and its code only.",
            _FINAL_NORM,
            _HEAD_INIT,
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
        recipe=Recipe(
            epochs=epochs,
            warmup_epochs=20,
            batch_size=4096,
            base_lr=1e-4,
            betas=(0.9, 0.95),
            weight_decay=0.3,
            ema=0.9999,
            **_MIXED,
        ),
        oddities=(
            (
                "The table prints no smallest rate and no pooling. Here the schedule ends at 0 and patches"
                " are averaged, as in the fine-tuning code, which the authors say trains from scratch too"
                " (issue 28 of their repository)."
            ),
            (
                "The paper reports the averaged weights; without averaging ViT-L and ViT-H are 1.1 and 2.2"
                " points lower (appendix A.2)."
            ),
        ),
    )


_DEIT_SCHEDULE = (
    "The published code changes the rate once per epoch, starts the warm-up at 1e-6 and counts the cosine"
    " from the first epoch; here it changes every step, starts near 0 and counts the cosine from the end of"
    " the warm-up."
)
_DEIT_AVERAGE = (
    "The published code also averages the weights (0.99996) but reports the plain ones, so nothing is"
    " averaged here."
)
_DEIT_REPEATS = (
    "With repeated augmentation an epoch sees a third of the images, each in three crops: in 300 epochs an"
    " image comes up in about 100."
)


def _deit(size: str) -> Published:
    return Published(
        f"deit-{size}",
        "arXiv 2012.12877, table 9; github.com/facebookresearch/deit, README_deit.md at 4da6691 and main.py"
        " at 0282d2a",
        model=f"deit_{size}_patch16_224",
        method="scratch",
        drop_path=0.1,
        augmentation=_ERASED,
        recipe=Recipe(
            epochs=300,
            warmup_epochs=5,
            batch_size=1024,
            base_lr=2.5e-4,
            min_lr=1e-5,
            weight_decay=0.05,
            repeats=3,
            **_MIXED,
        ),
        oddities=(
            (
                "The paper prints the rate per 512 images, 5e-4; per 256 it is 2.5e-4. The smallest rate,"
                " 1e-5, is the code's default."
            ),
            _DEIT_REPEATS,
            _DEIT_SCHEDULE,
            _DEIT_AVERAGE,
            _LAST_BATCH,
        ),
    )


_DEIT3 = "arXiv 2204.07118; github.com/facebookresearch/deit at 4bd679b, README_revenge.md"
_SAME_DROP = (
    "The published model drops every block at the same rate; timm's rate rises linearly from 0 to it, so it"
    " drops half as much."
)


def _deit3(size: str, patch: int, lr: float, image_size: int, drop_path: float) -> Published:
    smaller = (
        [f"It trains at {image_size} pixels; `deit3-fine-tune-{size}` then brings it to 224."]
        if image_size != 224
        else []
    )
    cut_off = [
        f"{image_size} is no multiple of the patch's {patch} pixels: the edge beyond the last whole patch is"
        " not seen."
    ]
    return Published(
        f"deit3-{size}",
        f"{_DEIT3}, ImageNet-1k, 800 epochs",
        model=f"deit3_{size}_patch{patch}_224",
        options={"init_values": 1e-4} | ({"img_size": image_size} if smaller else {}),
        method="scratch",
        drop_path=drop_path,
        augmentation=Augmentation(image_size, three_augment=True, color_jitter=0.3),
        recipe=Recipe(
            epochs=800,
            warmup_epochs=5,
            batch_size=2048,
            base_lr=lr * 256 / 2048,
            min_lr=1e-5,
            optimizer="lamb",
            weight_decay=0.05,
            clip=1.0,
            repeats=3,
            label_smoothing=0.0,
            mixup=0.8,
            cutmix=1.0,
            binary=True,
        ),
        oddities=(
            "The command prints absolute rates (`--unscale-lr`); per 256 images they are an eighth of it.",
            (
                "Weight decay is 0.05 in this 800-epoch command and 0.02 in the 400-epoch table of Touvron's"
                " thesis (HAL tel-03945782, table 6.1)."
            ),
            (
                "The command does not clip; LAMB does so inside, at 1.0, in timm as in the fused version that"
                " the command names."
            ),
            (
                "Mixed targets are rounded up: both of the two mixed classes count as fully present in the"
                " binary cross-entropy."
            ),
            _SAME_DROP,
            _DEIT_SCHEDULE,
            _DEIT_AVERAGE,
            _LAST_BATCH,
            *smaller,
            *(cut_off if image_size % patch else []),
        ),
    )


def _deit3_fine_tune(size: str, patch: int, drop_path: float) -> Published:
    return Published(
        f"deit3-fine-tune-{size}",
        f"{_DEIT3}, fine-tuning at 224",
        model=f"deit3_{size}_patch{patch}_224",
        options={"init_values": 1e-4},
        method="fine-tune",
        drop_path=drop_path,
        augmentation=_RAND_AUGMENT,
        recipe=Recipe(
            epochs=20,
            warmup_epochs=5,
            batch_size=512,
            base_lr=1e-5 * 256 / 512,
            min_lr=1e-5,
            weight_decay=0.1,
            **_MIXED,
        ),
        oddities=(
            (
                "The peak, 1e-5, is also the code's default for the smallest rate: after the warm-up the rate"
                " stays where it is."
            ),
            (
                f"It starts from the weights that `deit3-{size}` ends with, so the run must name them as its"
                " teacher."
            ),
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
        _mae_fine_tune(
            "base", 16, base_lr=5e-4, layer_decay=0.65, drop_path=0.1, epochs=100, of_table_9=_BASE_BY_TABLE_9
        ),
        _mae_fine_tune(
            "large",
            16,
            base_lr=1e-3,
            layer_decay=0.75,
            drop_path=0.2,
            epochs=50,
            of_table_9=_DROP_BY_TABLE_9.format(0.1, 0.2),
        ),
        _mae_fine_tune(
            "huge",
            14,
            base_lr=1e-3,
            layer_decay=0.75,
            drop_path=0.3,
            epochs=50,
            of_table_9=_DROP_BY_TABLE_9.format(0.2, 0.3),
        ),
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


def _built_in(method: str, trial: int, lr: float, **chosen) -> Published:
    return Published(
        f"built-in-{method}",
        "this project, the best of 6 on the validation split: "
        f"results/transfer/built-in.jsonl, {method}, trial {trial}",
        model="glyphs",
        method=method,
        plan=Plan(how=method) if method in HOW else None,
        augmentation=_PLAIN,
        recipe=Recipe(epochs=125, warmup_epochs=12.5, batch_size=128, base_lr=lr * 256 / 128, **chosen),
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
        _built_in("scratch", 5, lr=4e-3, weight_decay=0.3),
        _built_in("fine-tune", 3, lr=1e-3, layer_decay=0.75),
        _built_in("copy", 0, lr=1e-3),
        _built_in("distill", 5, lr=2e-3, transfer_weight=10.0),
        *(_cifar10_cpu(method) for method in METHODS),
    )
}


def published(name: str) -> Published:
    """A recipe by name: a paper's from `PUBLISHED`, or "SCALE-METHOD" as this project chose it, such as
    "built-in-copy". Raises `ValueError` for an unknown name, with the close ones."""
    require_known("recipe", name, names())
    return {**PUBLISHED, **OWN}[name]


def names() -> tuple[str, ...]:
    """The names of all recipes that `published` can give: the papers', and ours."""
    return *PUBLISHED, *OWN
