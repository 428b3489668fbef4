"""Recipes of detectors on plain ViTs, for COCO: ViTDet's, as attention transfer and MAE-Lite use it."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from atlib.plan import Plan
from atlib.train.recipe import Recipe
from atrun.method import Method
from atrun.published import Published

_VITDET = "arXiv 2203.16527; github.com/facebookresearch/detectron2 at 1d650ef, projects/ViTDet"
_CONFIG = "configs/COCO/mask_rcnn_vitdet_b_100ep.py"
_LITE = "arXiv 2205.14443; github.com/wangsr126/mae-lite at f3090d4, projects/eval_tools/det"
_STEPS_PER_EPOCH = 1849  # of 64 images of COCO's train2017
_DETECTOR = {"detector": "mask-rcnn", "detector_sizes": "vitdet", "jitter": (0.1, 2.0)}
_VALUES = {
    "epochs": 100,
    "warmup_epochs": 250 / _STEPS_PER_EPOCH,
    "milestones": (24 / 27, 26 / 27),
    "batch_size": 64,
    "base_lr": 1e-4 * 256 / 64,
    "weight_decay": 0.1,
    "label_smoothing": 0.0,
    "clip": None,
}
_SCHEDULE = (
    "The published length is 184,375 steps, 100 epochs of 118,000 images, and images without objects are"
    " left out there; here all 118,287 of train2017 count: 184,900 steps. The warm-up is 250 steps."
)
_NO_DECAY = "Biases are decayed in the published code; here they are not, nor is the class token."
_AMP = "The published configuration computes in mixed precision, this recipe does not."
_FINAL_NORM = (
    "The pyramid reads the tokens after the ViT's final norm, as its classifier would; the published code"
    " has no such norm, and drops the class token, which here takes part in attention."
)
_PLAIN_VIT = (
    "{} window attention in eight of twelve blocks, and relative positions. This ViT has neither: what is"
    " walked, copied and distilled is plain attention."
)
_TRANSFER = (
    "Not found: the paper's recipe. Its table prints ViTDet, ViT-B, 448 pixels and the results; all else is"
    " ViTDet's published configuration of ViT-B."
)
_TEACHER = "The paper's MAE was pre-trained on COCO itself, and is not published: --teacher names another."


def _scratch(*, name: str) -> Published:
    return Published(
        name,
        f"arXiv 2411.09702, table of detection; {_VITDET}, {_CONFIG}",
        model="vit_base_patch16_224",
        options={"img_size": 448},
        method=Method.SCRATCH,
        drop_path=0.1,
        augmentation=None,
        recipe=Recipe(**_VALUES),
        detection=_DETECTOR,
        oddities=(
            _TRANSFER,
            "ViTDet's layer decay of 0.7 protects what was pre-trained, and is left out where nothing was.",
            _PLAIN_VIT.format("ViTDet's configuration has"),
            _FINAL_NORM,
            _SCHEDULE,
            _NO_DECAY,
            _AMP,
        ),
    )


def _fine_tune(*, name: str) -> Published:
    scratch = _scratch(name=name)
    return replace(
        scratch,
        method=Method.FINE_TUNE,
        recipe=Recipe(**_VALUES | {"layer_decay": 0.7}),
        oddities=(_TEACHER, *(oddity for oddity in scratch.oddities if "layer decay" not in oddity)),
    )


def _distill(*, name: str) -> Published:
    scratch = _scratch(name=name)
    return replace(
        scratch,
        method=Method.DISTILL,
        plan=Plan(how="distill", layers=range(9)),
        recipe=Recipe(**_VALUES | {"transfer_weight": 1.0}),
        oddities=(
            _TEACHER,
            (
                "Not found: which layers the paper distills here. Nine of twelve is its share on ImageNet, 18"
                " of 24. The weight is 1: the paper uses 3 for its main result on ImageNet, and 1 for all"
                " others."
            ),
            *scratch.oddities,
        ),
    )


def _tiny(*, name: str) -> Published:
    return Published(
        name,
        f"{_LITE}, DETECTION.md and mask_rcnn_vitdet_t_100ep.py",
        model="vit_tiny_patch16_224",
        options={"num_heads": 12, "img_size": 640},
        method=Method.FINE_TUNE,
        augmentation=None,
        recipe=Recipe(**_VALUES | {"weight_decay": 0.05}),
        detection=_DETECTOR,
        oddities=(
            "Its layer decay is 1.0: one rate for all layers.",
            (
                "`mae-lite-pretrain` makes the teacher that it starts from; DeiT's and the distilled one are"
                " others."
            ),
            (
                "The paper's table has 38.9 and 35.1 (boxes and masks) after MAE, 42.7 and 38.2 after the"
                " distilled one, the repository 39.9 and 35.4, and 42.3 and 37.4."
            ),
            _PLAIN_VIT.format("The configuration it builds on has"),
            _FINAL_NORM,
            _SCHEDULE,
            _NO_DECAY,
            _AMP,
        ),
    )


DETECTION: Mapping[str, Callable[..., Published]] = {
    "vitdet-scratch-vit-base": _scratch,
    "vitdet-fine-tune-vit-base": _fine_tune,
    "vitdet-distill-vit-base": _distill,
    "vitdet-fine-tune-vit-tiny": _tiny,
}
