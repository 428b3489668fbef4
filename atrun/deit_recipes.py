"""Recipes of DeiT and of what its authors made next: DeiT III, CaiT, ResMLP and PatchConvNet."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from atlib.train.recipe import Recipe
from atrun.data.transforms import Augmentation
from atrun.method import Method
from atrun.published import ERASED, LAST_BATCH, RAND_AUGMENT, TUNED, Published

_DEIT = "arXiv 2012.12877; github.com/facebookresearch/deit at 7e160fe, README_deit.md and main.py"
_THESIS = "Touvron's thesis (HAL tel-03945782)"
# what the recipes at 20 epochs share: the rate never falls below its peak
_FINE = {"base_lr": 1e-5 * 256 / 512, "min_lr": 1e-5, "weight_decay": 0.1}

_DEIT_SCHEDULE = (
    "The published code changes the rate once per epoch, starts the warm-up at 1e-6 and counts the cosine"
    " from the first epoch; here it changes every step, starts near 0 and counts the cosine from the end of"
    " the warm-up."
)
_DEIT_AVERAGE = "Nothing is averaged here: DeiT's code averages (0.99996), but reports the plain weights."


def _deit(size: str, *, name: str) -> Published:
    return Published(
        name,
        "arXiv 2012.12877, table 9; github.com/facebookresearch/deit, README_deit.md at 4da6691 and main.py"
        " at 0282d2a",
        model=f"deit_{size}_patch16_224",
        method=Method.SCRATCH,
        drop_path=0.1,
        augmentation=ERASED,
        recipe=Recipe(**TUNED, epochs=300, batch_size=1024, base_lr=2.5e-4, min_lr=1e-5, repeats=3),
        oddities=(
            "The paper's rate, 5e-4, is per 512 images. The smallest, 1e-5, is the code's default.",
            "Repeated augmentation: an epoch sees a third of the images, in three crops each.",
            _DEIT_SCHEDULE,
            _DEIT_AVERAGE,
            LAST_BATCH,
        ),
    )


_DEIT3 = "arXiv 2204.07118; github.com/facebookresearch/deit at 4bd679b, README_revenge.md"
_LAMB = TUNED | {"optimizer": "lamb", "clip": 1.0, "label_smoothing": 0.0, "binary": True, "repeats": 3}
_SAME_DROP = "The published model drops all blocks at one rate; timm's rises from 0 to it: half as much."


def _unseen_rest(image_size: int, patch: int) -> list[str]:
    if image_size % patch == 0:
        return []
    return [f"{image_size} is no multiple of the patch's {patch} pixels: the rest is not seen."]


def _deit3(size: str, patch: int, lr: float, image_size: int, drop_path: float, *, name: str) -> Published:
    of_its_size = []
    if image_size != 224:
        of_its_size += [f"It trains at {image_size} pixels; `deit3-fine-tune-{size}` then brings it to 224."]
    of_its_size += _unseen_rest(image_size, patch)
    return Published(
        name,
        f"{_DEIT3}, ImageNet-1k, 800 epochs",
        model=f"deit3_{size}_patch{patch}_224",
        options={"init_values": 1e-4} | ({"img_size": image_size} if image_size != 224 else {}),
        method=Method.SCRATCH,
        drop_path=drop_path,
        augmentation=Augmentation(image_size, three_augment=True, color_jitter=0.3, crop_pct=1.0),
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
            LAST_BATCH,
            *of_its_size,
        ),
    )


def _deit3_400(size: str, patch: int, drop_path: float, *, name: str) -> Published:
    return Published(
        name,
        f"arXiv 2204.07118; {_THESIS}, tables 6.1, 6.14 and 6.15",
        model=f"deit3_{size}_patch{patch}_224",
        options={"init_values": 1e-4},
        method=Method.SCRATCH,
        drop_path=drop_path,
        augmentation=Augmentation(three_augment=True, color_jitter=0.3, crop_pct=1.0),
        recipe=Recipe(
            **(_LAMB | {"weight_decay": 0.02}),
            epochs=400,
            batch_size=2048,
            base_lr=3e-3 * 256 / 2048,
            min_lr=1e-5,
        ),
        oddities=(
            "Mixed targets are rounded up: in the binary cross-entropy both classes are fully present.",
            (
                "What the tables do not print (smallest rate, LayerScale's start) is that of `deit3-base`."
                " They print no size of images either: it is 224 here."
            ),
            _SAME_DROP,
            _DEIT_SCHEDULE,
            _DEIT_AVERAGE,
            LAST_BATCH,
        ),
    )


def _deit3_fine_tune(
    size: str, patch: int, drop_path: float, image_size: int = 224, *, name: str
) -> Published:
    starts_from = f"`deit3-{size}` ends with"
    if image_size != 224:
        starts_from = (
            f"training at 224 pixels ends with (`deit3-{size}`, then, but for S, `deit3-fine-tune-{size}`)"
        )
    return Published(
        name,
        f"{_DEIT3}, fine-tuning at {image_size}",
        model=f"deit3_{size}_patch{patch}_224",
        options={"init_values": 1e-4} | ({"img_size": image_size} if image_size != 224 else {}),
        method=Method.FINE_TUNE,
        drop_path=drop_path,
        augmentation=replace(RAND_AUGMENT, image_size=image_size, crop_pct=1.0),
        recipe=Recipe(epochs=20, batch_size=512, **(TUNED | _FINE)),
        oddities=(
            "The peak, 1e-5, is the code's default for the smallest rate too: after warm-up the rate stays.",
            f"It starts from what {starts_from}: the run must name those weights as its teacher.",
            *([] if drop_path == 0 else [_SAME_DROP]),
            _DEIT_AVERAGE,
            LAST_BATCH,
        ),
    )


# ImageNet-21k: a softmax again, smoothed, CutMix alone, each image once, a simple crop
_21K = _LAMB | {"label_smoothing": 0.1, "binary": False, "mixup": 0.0, "weight_decay": 0.02, "repeats": 1}


def _simple(image_size: int) -> Augmentation:
    return Augmentation(image_size, crop="padded", three_augment=True, color_jitter=0.3, crop_pct=1.0)


def _deit3_21k(
    size: str, patch: int, epochs: int, image_size: int, drop_path: float, *, name: str
) -> Published:
    of_its_size = []
    if size == "small":
        of_its_size += ["The thesis (table 6.14) prints a drop path of 0 for this size, the command 0.05."]
    if epochs != 90:
        of_its_size += ["The thesis's text names 90 epochs; its table 6.5 has 240, too, as the command has."]
    of_its_size += _unseen_rest(image_size, patch)
    return Published(
        name,
        f"{_DEIT3}, training on ImageNet-21k; compare {_THESIS}, table 6.1",
        model=f"deit3_{size}_patch{patch}_224",
        options={"init_values": 1e-4} | ({"img_size": image_size} if image_size != 224 else {}),
        method=Method.SCRATCH,
        drop_path=drop_path,
        augmentation=_simple(image_size),
        recipe=Recipe(**_21K, epochs=epochs, batch_size=2048, base_lr=1e-3 * 256 / 2048, min_lr=1e-5),
        oddities=(
            "The command's peak is 1e-3 (1.5e-3 for a batch of 4,096, it says); the thesis prints 3e-3.",
            (
                "The command names 1,000 classes (`--nb-classes 1000`), and `datasets.py` opens no"
                " ImageNet-21k. Here classes are those of the data that the run names; all images of"
                ' `imagenet-21k` are its split "train+validation".'
            ),
            _SAME_DROP,
            _DEIT_SCHEDULE,
            _DEIT_AVERAGE,
            LAST_BATCH,
            *of_its_size,
        ),
    )


def _deit3_21k_fine_tune(size: str, patch: int, drop_path: float, *, name: str) -> Published:
    return Published(
        name,
        f"{_DEIT3}, fine-tuning on ImageNet-1k after ImageNet-21k; compare {_THESIS}, table 6.1",
        model=f"deit3_{size}_patch{patch}_224",
        options={"init_values": 1e-4},
        method=Method.FINE_TUNE,
        drop_path=drop_path,
        augmentation=_simple(224),
        recipe=Recipe(**_21K, epochs=50, batch_size=2048, base_lr=3e-4 * 256 / 2048, min_lr=1e-5),
        oddities=(
            (
                f"It starts from what `deit3-21k-{size}` ends with: the run must name those weights as its"
                " teacher. The printed command has no `--finetune`, without which it starts from nothing."
            ),
            _SAME_DROP,
            _DEIT_SCHEDULE,
            _DEIT_AVERAGE,
            LAST_BATCH,
        ),
    )


def _deit_384(*, name: str) -> Published:
    return Published(
        name,
        f"{_DEIT}, fine-tuning at 384",
        model="deit_base_patch16_224",
        options={"img_size": 384},
        method=Method.FINE_TUNE,
        teacher="deit_base_patch16_224.fb_in1k",
        drop_path=0.1,
        augmentation=replace(ERASED, image_size=384),
        recipe=Recipe(
            epochs=30,
            batch_size=512,
            repeats=3,
            **(TUNED | {"base_lr": 5e-6 * 256 / 512, "min_lr": 5e-6, "weight_decay": 1e-8}),
        ),
        oddities=(
            "Peak and smallest rate are both 5e-6: after warm-up the rate stays.",
            "A weight decay of 1e-8 is none.",
            "The command fine-tunes for 30 epochs, the paper for 25.",
            "Positions are resized by bicubic interpolation, as in the published code.",
            "The class head goes on from the teacher's there; here, as in every fine-tuning, it is new.",
            _DEIT_SCHEDULE,
            _DEIT_AVERAGE,
            LAST_BATCH,
        ),
    )


# --- Other networks than ViTs; none of them can be a student that is handed maps on the command line ---


def _cait(
    model: str, drop_path: float, scale: float, *of_its_size: str, depth: int | None = None, name: str
) -> Published:
    """depth: of a size that timm has under no name, whose width the named model has."""
    size = {"init_values": scale} | ({} if model.endswith("224") else {"img_size": 224})
    return Published(
        name,
        f"arXiv 2103.17239; {_THESIS}, section 3.7 and table 3.16; crop: README_cait.md of deit at 7e160fe",
        model=model,
        options=size if depth is None else size | {"depth": depth},
        method=Method.SCRATCH,
        drop_path=drop_path,
        augmentation=replace(ERASED, crop_pct=1.0),
        recipe=Recipe(**TUNED, epochs=400, batch_size=1024, base_lr=2.5e-4, min_lr=1e-5, repeats=3),
        oddities=(
            "What neither prints (augmentation, mixing, smoothing, smallest rate) is DeiT's: it is its code.",
            *of_its_size,
            _DEIT_SCHEDULE,
            _DEIT_AVERAGE,
            LAST_BATCH,
        ),
    )


def _resmlp(model: str, *of_its_size: str, name: str) -> Published:
    return Published(
        name,
        f"arXiv 2105.03404, section 3.1; {_THESIS}, section 4.3; crop: README_resmlp.md of deit at 7e160fe",
        model=model,
        method=Method.SCRATCH,
        drop_path=0.1,
        augmentation=replace(ERASED, crop_pct=0.9),
        recipe=Recipe(
            epochs=400,
            batch_size=1024,
            base_lr=5e-3 * 256 / 1024,
            min_lr=1e-5,
            repeats=3,
            **(TUNED | {"optimizer": "lamb", "weight_decay": 0.2, "clip": 1.0}),
        ),
        oddities=(
            (
                "Printed are LAMB, its rate, 5e-3, and weight decay 0.2; the rest is DeiT's, with its batch"
                " of 1,024. Whether 5e-3 is absolute or, as DeiT's rate, per 512 images, is not said: here it"
                " is absolute."
            ),
            "LAMB clips inside, at 1.0, as timm's does.",
            *of_its_size,
            _DEIT_SCHEDULE,
            _DEIT_AVERAGE,
            LAST_BATCH,
        ),
    )


def _resnet_strikes_back(
    strength: int, drop_path: float, recipe: Mapping, *of_its_own: str, image_size: int = 224, name: str
) -> Published:
    """strength: of RandAugment; recipe: fields of `Recipe`."""
    return Published(
        name,
        "arXiv 2110.00476, as github.com/open-mmlab/mmpretrain has it in configs/resnet; compare"
        f" {_THESIS}, table 6.1",
        model="resnet50",
        method=Method.SCRATCH,
        drop_path=drop_path,
        augmentation=Augmentation(image_size, crop_pct=0.95, rand_augment=f"rand-m{strength}-mstd0.5-inc1"),
        recipe=Recipe(**recipe),
        oddities=(
            "Its rate is absolute; per 256 images it is an eighth of it.",
            "Mixed targets are rounded up: in the binary cross-entropy both classes are fully present.",
            *of_its_own,
            LAST_BATCH,
        ),
    )


def _patch_conv_net(size: str, drop_path: float, *, name: str) -> Published:
    return Published(
        name,
        f"arXiv 2112.13692; {_THESIS}, section 5.3 and table 5.8",
        model=size,
        method=Method.SCRATCH,
        drop_path=drop_path,
        augmentation=RAND_AUGMENT,
        recipe=Recipe(
            epochs=400,
            batch_size=2048,
            base_lr=3e-3 * 256 / 2048,
            **(TUNED | {"optimizer": "lamb", "weight_decay": 0.01 if size[0] == "S" else 0.05, "clip": 1.0}),
        ),
        oddities=(
            (
                "Read in the source: epochs, batch, rate, weight decay, mixup, CutMix and drop path. Not"
                " found there, and taken from its authors' other recipes: LAMB, five epochs of warm-up, label"
                " smoothing, RandAugment. No erasing and no repeated augmentation is assumed."
            ),
            "The drop path is the one that the authors' comparison of norms prints for this size.",
            LAST_BATCH,
        ),
    )


DEIT: Mapping[str, Callable[..., Published]] = {
    "deit-tiny": partial(_deit, "tiny"),
    "deit-small": partial(_deit, "small"),
    "deit-base": partial(_deit, "base"),
    "deit-base-384": _deit_384,
    "deit3-small": partial(_deit3, "small", 16, lr=4e-3, image_size=224, drop_path=0.05),
    "deit3-base": partial(_deit3, "base", 16, lr=3e-3, image_size=192, drop_path=0.2),
    "deit3-large": partial(_deit3, "large", 16, lr=3e-3, image_size=192, drop_path=0.45),
    "deit3-huge": partial(_deit3, "huge", 14, lr=3e-3, image_size=160, drop_path=0.6),
    "deit3-small-400": partial(_deit3_400, "small", 16, drop_path=0.0),
    "deit3-base-400": partial(_deit3_400, "base", 16, drop_path=0.1),
    "deit3-large-400": partial(_deit3_400, "large", 16, drop_path=0.4),
    "deit3-huge-400": partial(_deit3_400, "huge", 14, drop_path=0.5),
    "deit3-fine-tune-base": partial(_deit3_fine_tune, "base", 16, drop_path=0.2),
    "deit3-fine-tune-large": partial(_deit3_fine_tune, "large", 16, drop_path=0.45),
    "deit3-fine-tune-huge": partial(_deit3_fine_tune, "huge", 14, drop_path=0.55),
    "deit3-fine-tune-small-384": partial(_deit3_fine_tune, "small", 16, drop_path=0.0, image_size=384),
    "deit3-fine-tune-base-384": partial(_deit3_fine_tune, "base", 16, drop_path=0.15, image_size=384),
    "deit3-fine-tune-large-384": partial(_deit3_fine_tune, "large", 16, drop_path=0.4, image_size=384),
    "deit3-21k-small": partial(_deit3_21k, "small", 16, epochs=240, image_size=224, drop_path=0.05),
    "deit3-21k-base": partial(_deit3_21k, "base", 16, epochs=240, image_size=224, drop_path=0.1),
    "deit3-21k-large": partial(_deit3_21k, "large", 16, epochs=240, image_size=224, drop_path=0.3),
    "deit3-21k-huge": partial(_deit3_21k, "huge", 14, epochs=90, image_size=128, drop_path=0.5),
    "deit3-21k-fine-tune-small": partial(_deit3_21k_fine_tune, "small", 16, drop_path=0.05),
    "deit3-21k-fine-tune-base": partial(_deit3_21k_fine_tune, "base", 16, drop_path=0.15),
    "deit3-21k-fine-tune-large": partial(_deit3_21k_fine_tune, "large", 16, drop_path=0.4),
    "deit3-21k-fine-tune-huge": partial(_deit3_21k_fine_tune, "huge", 14, drop_path=0.45),
}
_SCALE_BY_CODE = (
    "Table 3.16 starts LayerScale at 1e-6 here, the authors' model and timm's at 1e-5, as this does."
)
_SCALE_BY_TIMM = "The authors' model starts LayerScale at {}, timm's at {}."
_A2 = _LAMB | {
    "weight_decay": 0.02,
    "mixup": 0.1,
    "epochs": 300,
    "batch_size": 2048,
    "base_lr": 5e-3 * 256 / 2048,
    "min_lr": 1e-6,
}
# What timm builds, so that the command line trains it.
OTHER_NETWORKS: Mapping[str, Callable[..., Published]] = {
    "cait-xxs24": partial(_cait, "cait_xxs24_224", 0.05, 1e-5),
    "cait-xxs36": partial(_cait, "cait_xxs36_224", 0.1, 1e-5, _SCALE_BY_CODE),
    "cait-xs24": partial(_cait, "cait_xs24_384", 0.05, 1e-5),
    "cait-s24": partial(_cait, "cait_s24_224", 0.1, 1e-5),
    "cait-xs36": partial(_cait, "cait_xs24_384", 0.1, 1e-6, depth=36),
    "cait-s36": partial(_cait, "cait_s36_384", 0.2, 1e-6),
    "cait-s48": partial(_cait, "cait_s36_384", 0.3, 1e-6, depth=48),
    "cait-m24": partial(_cait, "cait_m36_384", 0.2, 1e-5, depth=24),
    "cait-m36": partial(_cait, "cait_m36_384", 0.3, 1e-6),
    "cait-m48": partial(_cait, "cait_m48_448", 0.4, 1e-6),
    "resmlp-s12": partial(_resmlp, "resmlp_12_224", _SCALE_BY_TIMM.format("0.1", "1e-4")),
    "resmlp-s24": partial(_resmlp, "resmlp_24_224"),
    "resmlp-b24": partial(
        _resmlp, "resmlp_big_24_224", "Patches of 8 pixels, as in timm: the paper's B24/8, not its B24 (16)."
    ),
    "resnet50-a1": partial(
        _resnet_strikes_back,
        7,
        0.05,
        _A2 | {"epochs": 600, "weight_decay": 0.01, "mixup": 0.2},
        "Whether it smooths labels was not found in that code; here it does not.",
    ),
    "resnet50-a2": partial(
        _resnet_strikes_back, 7, 0.05, _A2, "The thesis (table 6.1) prints a mixup of 0.2."
    ),
    "resnet50-a3": partial(
        _resnet_strikes_back,
        6,
        0.0,
        _A2 | {"epochs": 100, "base_lr": 8e-3 * 256 / 2048, "repeats": 1},
        (
            "In its paper it trains at 160 pixels and is tested at 224 (the files that we read crop to 224)."
            " Here a run is tested at the size that it trains at."
        ),
        image_size=160,
    ),
}
# What only `atfamily.patch_conv` builds.
PATCH_CONV: Mapping[str, Callable[..., Published]] = {
    "patch-conv-s60": partial(_patch_conv_net, "S60", 0.15),
    "patch-conv-s120": partial(_patch_conv_net, "S120", 0.2),
    "patch-conv-b60": partial(_patch_conv_net, "B60", 0.3),
    "patch-conv-b120": partial(_patch_conv_net, "B120", 0.4),
}
