"""The study of where things are: the same backbones, taught in five ways, under detectors and a segmenter."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from atlib.data.glyphs import SHAPES
from atlib.data.images import Images
from atlib.data.rng import seed_for
from atlib.detection.detector import detect, detection_loss, fcos, mask_rcnn
from atlib.detection.objects import ObjectImages
from atlib.detection.precision import SCENE_SIZES, coco_precision
from atlib.detection.segment import Segmenter, mean_iou, pixel_images, segmentation_loss
from atlib.lab.scales import LABELLED_SCENES, SceneScale
from atlib.lab.study import Measure, Sources, Study, Variant, by, fine_tune, scratch, untrained_maps
from atlib.lab.tuning import grid
from atlib.train.objectives import Loss
from atlib.transfer import AttentionTransfer


def _figures(model: nn.Module, images: ObjectImages, masks: bool) -> dict[str, float]:
    """COCO's figures of boxes and, with "mask_" before them, of masks; without those of sizes that no object
    has."""
    found = detect(model, images)
    each = coco_precision(found, images.objects, sizes=SCENE_SIZES)._asdict()
    if masks:
        of_masks = coco_precision(found, images.objects, masks=True, sizes=SCENE_SIZES)
        each |= {f"mask_{name}": value for name, value in of_masks._asdict().items()}
    return {name: value for name, value in each.items() if not math.isnan(value)}


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
}


def _frozen(sources: Sources) -> nn.Module:
    """The teacher's weights as they are: what is trained stands on them."""
    return fine_tune(sources).requires_grad_(False)


Backbone = Callable[[Sources], nn.Module]
# The paper's three, and two that ask which half of the backbone a head needs: its routing, or all of it.
METHODS: dict[str, Backbone] = {
    "scratch": scratch,
    "fine-tune": fine_tune,
    "distill": by(how="distill"),
    "copy": by(),
    "frozen": _frozen,
}
# Of other teachers than the masked auto-encoder.
OTHERS: dict[str, Backbone] = {
    "fine-tune from supervised": partial(fine_tune, schooling=LABELLED_SCENES),
    "distill from supervised": by(how="distill", schooling=LABELLED_SCENES),
    "copy from supervised": by(schooling=LABELLED_SCENES),
    "copy from untrained": untrained_maps,
}
# One grid for all that stands on a backbone; λ is the paper's for all.
_RATES = grid(lr=(5e-4, 2e-3, 8e-3, 3.2e-2))


def _under(name: str, backbone: Backbone, sources: Sources) -> nn.Module:
    """A head on a backbone: its first weights are the same for all backbones of a seed."""
    head, vit = HEADS[name], backbone(sources)
    torch.manual_seed(seed_for(sources.seed, "head", sources.again))
    return head.build(vit, len(SHAPES) + head.more)


def _variants(name: str, backbones: Mapping[str, Backbone]) -> tuple[Variant, ...]:
    head = HEADS[name]
    return tuple(
        Variant(
            f"{name}, {method}",
            partial(_under, name, backbone),
            like=None,
            changes={"steps": head.steps},
            trials=_RATES,
            images=head.images,
            loss=head.loss,
            measure=head.measure,
        )
        for method, backbone in backbones.items()
    )


DETECTION = Study(
    "detection",
    "where things are: FCOS, Mask R-CNN, and segmenters with and without convolutions, on backbones from"
    " scratch, fine-tuned, with distilled and with copied maps, and frozen",
    "ViTDet on COCO (ViT-B): box AP scratch 39.1, distill 43.6, fine-tuning 46.3; copy was not tried",
    (
        *_variants("fcos", METHODS | OTHERS),
        *_variants("mask r-cnn", {name: METHODS[name] for name in ("scratch", "fine-tune", "distill")}),
        *_variants("segment", METHODS),
        *_variants("segment with convolutions", METHODS),
    ),
    seeds=3,
    minutes=110,
    only=("scenes",),
    teachers=(LABELLED_SCENES,),
)
