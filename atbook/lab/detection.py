"""The study of where things are: the same backbones, taught in five ways, under detectors and a segmenter."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from atbook.lab.scales import LABELLED_SCENES, SceneScale
from atbook.lab.study import Measure, Sources, Variant, by, fine_tune, scratch, study, untrained_maps
from atbook.lab.tuning import Ladder
from atbook.worlds.glyphs import SHAPES
from atfamily.detection.detector import detect, detection_loss, fcos, mask_rcnn
from atfamily.detection.objects import ObjectImages
from atfamily.detection.precision import SCENE_SIZES, coco_precision
from atfamily.detection.segment import Segmenter, mean_iou, pixel_images, segmentation_loss
from atlib.attention_transfer import AttentionTransfer
from atlib.data import Images
from atlib.loading import seed_for
from atlib.objectives import Loss


def _figures(model: nn.Module, images: ObjectImages, masks: bool) -> dict[str, float]:
    """COCO's figures of boxes and, with "mask_" before them, of masks; without those of sizes that no object
    has."""
    detected = detect(model, images)
    figures = coco_precision(detected, images.objects, sizes=SCENE_SIZES)._asdict()
    if masks:
        of_masks = coco_precision(detected, images.objects, masks=True, sizes=SCENE_SIZES)
        figures |= {f"mask_{name}": value for name, value in of_masks._asdict().items()}
    return {name: value for name, value in figures.items() if not math.isnan(value)}


def _iou(model: nn.Module, images: ObjectImages) -> dict[str, float]:
    return {"iou": mean_iou(model, pixel_images(images), len(SHAPES) + 1)}


def _labelled_pixels(scale: SceneScale, seed: int) -> Images:
    return pixel_images(scale.labelled(seed))


@dataclass(frozen=True)
class _Head:
    """What stands on a backbone. build: (backbone, classes) -> the model, whose classes are the shapes and
    `more`; steps: of its training."""

    build: Callable[[VisionTransformer | AttentionTransfer, int], nn.Module]
    loss: Loss
    measure: Measure
    steps: int
    more: int = 0
    images: Callable[[SceneScale, int], Images] | None = None


_PIXELS = partial(
    _Head,
    loss=segmentation_loss,
    measure=Measure("iou", _iou),
    steps=500,
    more=1,  # the background
    images=_labelled_pixels,
)
HEADS = {
    "fcos": _Head(fcos, detection_loss, Measure("ap", partial(_figures, masks=False)), steps=1500),
    "mask r-cnn": _Head(mask_rcnn, detection_loss, Measure("ap", partial(_figures, masks=True)), steps=800),
    "segment": _PIXELS(Segmenter),
    # Do detectors need a teacher's maps less because they have convolutions? These are all that differs.
    "segment with convolutions": _PIXELS(partial(Segmenter, convolutions=2)),
    # As deep, and no place hears of another.
    "segment with 1 x 1 convolutions": _PIXELS(partial(Segmenter, convolutions=2, size=1)),
}


def _frozen(sources: Sources) -> nn.Module:
    """The teacher's weights as they are: what is trained stands on them."""
    return fine_tune(sources).requires_grad_(False)


Backbone = Callable[[Sources], nn.Module]
# The paper's three, and two that ask which half of the backbone a head needs: its routing, or all of it. By
# the method and the teacher, None for the masked auto-encoder.
BACKBONES: dict[tuple[str, str | None], Backbone] = {
    ("scratch", None): scratch,
    ("fine-tune", None): fine_tune,
    ("distill", None): by(how="distill"),
    ("copy", None): by(),
    ("frozen", None): _frozen,
}
OF_OTHER_TEACHERS: dict[tuple[str, str | None], Backbone] = {
    ("fine-tune", "supervised"): fine_tune,
    ("distill", "supervised"): by(how="distill"),
    ("copy", "supervised"): by(),
    ("copy", "untrained"): untrained_maps,
}
# One grid for all that stands on a backbone. λ = 3 for all is ours: the paper has it in its main result on
# ImageNet, and 1 in all others.
_RATES = Ladder("lr", (5e-4, 2e-3, 8e-3, 3.2e-2))


def _under(name: str, backbone: Backbone, sources: Sources) -> nn.Module:
    """A head on a backbone: its first weights are the same for all backbones of a seed."""
    head, vit = HEADS[name], backbone(sources)
    torch.manual_seed(seed_for(sources.seed, "head", sources.again))
    return head.build(vit, len(SHAPES) + head.more)


def _variants(name: str, backbones: Mapping[tuple[str, str | None], Backbone] = BACKBONES) -> list[Variant]:
    head = HEADS[name]
    return [
        Variant(
            f"{name}, {method}" + (f" from {teacher}" if teacher else ""),
            partial(_under, name, backbone),
            like=None,
            changes={"steps": head.steps},
            trials=_RATES,
            images=head.images,
            loss=head.loss,
            measure=head.measure,
            schooling=LABELLED_SCENES if teacher == "supervised" else None,
        )
        for (method, teacher), backbone in backbones.items()
    ]


def _some(*methods: str) -> dict[tuple[str, str | None], Backbone]:
    return {(method, None): BACKBONES[method, None] for method in methods}


DETECTION = study(
    "detection",
    *_variants("fcos", BACKBONES | OF_OTHER_TEACHERS),
    *_variants("mask r-cnn", _some("scratch", "fine-tune", "distill")),
    *_variants("segment"),
    *_variants("segment with convolutions"),
    *_variants("segment with 1 x 1 convolutions", _some("scratch", "distill", "copy")),
)
