"""Detectors: a backbone's grid of tokens, a pyramid on it, and torchvision's heads on the pyramid."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from timm.layers import LayerNorm2d
from timm.models import VisionTransformer
from torch import Tensor, nn
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead, FastRCNNPredictor
from torchvision.models.detection.fcos import FCOS, FCOSHead
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.roi_heads import RoIHeads, paste_masks_in_image
from torchvision.models.detection.rpn import RegionProposalNetwork, RPNHead
from torchvision.ops import MultiScaleRoIAlign

from atfamily.detection.objects import Found, ObjectBatch, ObjectImages
from atfamily.detection.pyramid import SCALES, GridOfTokens, SimplePyramid
from atlib._util import in_eval_mode
from atlib.attention_transfer import AttentionTransfer
from atlib.losses import note
from atlib.pair import student_of
from atlib.recipe import Recipe


class Detected(NamedTuple):
    """A detector's output. losses: its own, by name, in training with objects, else empty; transfer_loss:
    unweighted, a scalar, of a backbone that distills; found: what it says of each image, in evaluation, else
    empty."""

    losses: dict[str, Tensor]
    transfer_loss: Tensor
    found: list[Found]


@dataclass(frozen=True)
class Sizes:
    """What a detector's parts measure. width: channels of the pyramid; scales: its levels (`SCALES`); tower:
    convolutions in FCOS's head; anchors: the side of a square anchor of each level in pixels, for region
    proposals, and `ratios`, height by width; proposal_depth: convolutions before them; box_convs, box_width:
    of the box head; mask_convs: of the mask head; canonical: the side of an object that belongs to the level
    at the grid's own scale, in pixels; sampled: boxes of an image that the losses look at, of proposals and
    of objects; proposals: kept before and after suppression; kept: boxes said of an image."""

    width: int
    scales: Sequence[float]
    tower: int
    anchors: Sequence[float]
    ratios: Sequence[float]
    proposal_depth: int
    box_convs: int
    box_width: int
    mask_convs: int
    canonical: float
    sampled: tuple[int, int]
    proposals: tuple[int, int]
    kept: int


# ViTDet's (arXiv 2203.16527, appendix A.2; detectron2's projects/ViTDet); its fifth level is for proposals.
VITDET = Sizes(
    width=256,
    scales=SCALES,
    tower=4,
    anchors=(32, 64, 128, 256, 512),
    ratios=(0.5, 1.0, 2.0),
    proposal_depth=2,
    box_convs=4,
    box_width=1024,
    mask_convs=4,
    canonical=224,
    sampled=(256, 512),
    proposals=(2000, 1000),
    kept=100,
)
# For scenes of 64 x 64 pixels. Without the level of a quarter of a patch, which is half of the cost.
SMALL = Sizes(
    width=32,
    scales=(2.0, 1.0, 0.5),
    tower=1,
    anchors=(10, 16, 24),
    ratios=(1.0,),
    proposal_depth=1,
    box_convs=1,
    box_width=128,
    mask_convs=2,
    canonical=12,
    sampled=(64, 32),
    proposals=(200, 60),
    kept=20,
)


class FcosHeads(nn.Module):
    """FCOS on a pyramid's levels: for every place of every level, how likely each class is, how far away the
    four edges are, and how central the place is. The code is torchvision's, put together without its
    resizing: images come in the size that the ViT takes.

    Source: Tian et al. 2019, "FCOS" (arXiv 1904.01355).
    """

    masks = False

    def __init__(self, classes: int, strides: Sequence[float], sizes: Sizes):
        super().__init__()
        anchors = AnchorGenerator(tuple((stride,) for stride in strides), ((1.0,),) * len(strides))
        self.fcos = FCOS(
            _NoBackbone(sizes.width),
            num_classes=classes,
            anchor_generator=anchors,
            head=FCOSHead(sizes.width, 1, classes, num_convs=sizes.tower),
            score_thresh=0.05,
            detections_per_img=sizes.kept,
        )

    def forward(
        self, levels: list[Tensor], images: Tensor, objects: ObjectBatch | None
    ) -> tuple[dict[str, Tensor], list[Found]]:
        fcos, batch = self.fcos, _image_list(images)
        outputs, anchors = fcos.head(levels), fcos.anchor_generator(batch, levels)
        numbers = [level.shape[-2] * level.shape[-1] for level in levels]
        if objects is not None:
            return fcos.compute_loss(_to_learn(objects, 0), outputs, anchors, numbers), []
        by_level = {name: list(value.split(numbers, dim=1)) for name, value in outputs.items()}
        split = [list(one.split(numbers)) for one in anchors]
        boxes = fcos.postprocess_detections(by_level, split, batch.image_sizes)
        return {}, [Found(one["boxes"], one["labels"], one["scores"]) for one in boxes]


class RegionHeads(nn.Module):
    """Faster R-CNN, and with `masks` Mask R-CNN, on a pyramid's levels: regions that may hold something are
    proposed, and of each is said what it is, where exactly, and which pixels it has. The code is
    torchvision's: other than in ViTDet's, regions are pooled half a cell off (not aligned), at 2 x 2 points a
    bin, and errors of boxes are squared where they are below 1/9.

    Sources: Ren et al. 2015 (arXiv 1506.01497), He et al. 2017 (arXiv 1703.06870); heads with layer norms as
    in ViTDet.
    """

    def __init__(self, classes: int, patch: int, sizes: Sizes, masks: bool):
        super().__init__()
        self.masks, width = masks, sizes.width
        names = [str(number) for number in range(len(sizes.scales))]
        level = round(math.log2(patch))  # torchvision counts levels by the logarithm of their stride
        pool = partial(
            MultiScaleRoIAlign,
            names,
            sampling_ratio=2,
            canonical_scale=sizes.canonical,
            canonical_level=level,
        )
        anchors = AnchorGenerator(
            tuple((side,) for side in sizes.anchors), (tuple(sizes.ratios),) * len(sizes.anchors)
        )
        before, after = sizes.proposals
        self.proposals = RegionProposalNetwork(
            anchors,
            RPNHead(width, len(sizes.ratios), conv_depth=sizes.proposal_depth),
            fg_iou_thresh=0.7,
            bg_iou_thresh=0.3,
            batch_size_per_image=sizes.sampled[0],
            positive_fraction=0.5,
            pre_nms_top_n={"training": before, "testing": min(before, 1000)},
            post_nms_top_n={"training": after, "testing": after},
            nms_thresh=0.7,
        )
        norm = partial(LayerNorm2d, eps=1e-6)
        with_masks = {}
        if masks:
            with_masks = {
                "mask_roi_pool": pool(output_size=14),
                "mask_head": MaskRCNNHeads(width, [width] * sizes.mask_convs, 1, norm_layer=norm),
                "mask_predictor": MaskRCNNPredictor(width, width, classes + 1),
            }
        self.regions = RoIHeads(
            pool(output_size=7),
            FastRCNNConvFCHead((width, 7, 7), [width] * sizes.box_convs, [sizes.box_width], norm_layer=norm),
            FastRCNNPredictor(sizes.box_width, classes + 1),
            fg_iou_thresh=0.5,
            bg_iou_thresh=0.5,
            batch_size_per_image=sizes.sampled[1],
            positive_fraction=0.25,
            bbox_reg_weights=None,
            score_thresh=0.05,
            nms_thresh=0.5,
            detections_per_img=sizes.kept,
            **with_masks,
        )

    def forward(
        self, levels: list[Tensor], images: Tensor, objects: ObjectBatch | None
    ) -> tuple[dict[str, Tensor], list[Found]]:
        batch, named = _image_list(images), {str(number): level for number, level in enumerate(levels)}
        # class 0 is the background here
        wanted = None if objects is None else _to_learn(objects, 1)
        proposals, of_proposals = self.proposals(batch, named, wanted)
        results, of_regions = self.regions(named, proposals, batch.image_sizes, wanted)
        return of_proposals | of_regions, [self._said(result, images.shape[-2:]) for result in results]

    def _said(self, detection: dict[str, Tensor], size: Sequence[int]) -> Found:
        masks = None
        if self.masks:
            masks = paste_masks_in_image(detection["masks"], detection["boxes"], tuple(size))[:, 0] > 0.5
        return Found(detection["boxes"], detection["labels"] - 1, detection["scores"], masks)


class Detector(nn.Module):
    """A ViT, or an `AttentionTransfer` pair, that says where things are. `forward(images, objects)` in
    training gives the heads' losses and the pair's transfer loss; `forward(images)` in evaluation gives what
    it found. Copy keeps routing frozen under a pyramid that is trained."""

    def __init__(self, vit: VisionTransformer | AttentionTransfer, heads: nn.Module, sizes: Sizes):
        super().__init__()
        patch = student_of(vit).patch_embed.patch_size
        if patch[0] != patch[1] or patch[0] & (patch[0] - 1):  # torchvision would round the strides of levels
            raise ValueError(f"patches of {patch} pixels: a detector needs a power of two, square")
        self.backbone = GridOfTokens(vit)
        self.sizes = sizes
        top = len(sizes.anchors) > len(sizes.scales)
        self.pyramid = SimplePyramid(student_of(vit).embed_dim, sizes.width, sizes.scales, top)
        self.heads = heads

    def forward(self, images: Tensor, objects: ObjectBatch | None = None) -> Detected:
        if self.training and objects is None:
            raise ValueError("in training a detector needs objects, got None: call .eval() to detect")
        seen = self.backbone(images)
        losses, detections = self.heads(self.pyramid(seen.grid), images, objects if self.training else None)
        return Detected(losses, seen.transfer_loss, detections)

    @property
    def teacher(self) -> nn.Module | None:
        """The frozen teacher of the pair that the detector stands on; None on a ViT alone."""
        return getattr(self.backbone.vit, "teacher", None)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Compute the ViT's activations a second time instead of keeping them."""
        self.backbone.student.set_grad_checkpointing(enable)

    # By the next two names timm's optimisers ask a model about its parameters.

    def no_weight_decay(self) -> set[str]:
        """The backbone's positions and tokens."""
        return {f"backbone.{name}" for name in self.backbone.no_weight_decay()}

    def group_matcher(self, coarse: bool = False) -> dict:
        """Layers for layer-wise decay of the learning rate: the ViT's own; all that stands on it is the last,
        and has the whole rate (Li et al. 2022, arXiv 2203.16527, as in its published code)."""
        prefix = f"^{re.escape(f'backbone.{self.backbone.prefix}')}"
        return {
            "stem": prefix + r"(?:cls_token|reg_token|pos_embed|patch_embed|norm_pre)",
            "blocks": [(prefix + r"blocks\.(\d+)", None), (prefix + "norm", (99999,))],
        }


def fcos(vit: VisionTransformer | AttentionTransfer, classes: int, sizes: Sizes = SMALL) -> Detector:
    """FCOS on a ViT's simple pyramid."""
    side = student_of(vit).patch_embed.patch_size[0]
    return Detector(vit, FcosHeads(classes, [side / scale for scale in sizes.scales], sizes), sizes)


def mask_rcnn(
    vit: VisionTransformer | AttentionTransfer, classes: int, sizes: Sizes = SMALL, masks: bool = True
) -> Detector:
    """Mask R-CNN on a ViT's simple pyramid; Faster R-CNN without `masks`."""
    side = student_of(vit).patch_embed.patch_size[0]
    return Detector(vit, RegionHeads(classes, side, sizes, masks), sizes)


def faster_rcnn(vit: VisionTransformer | AttentionTransfer, classes: int, sizes: Sizes = SMALL) -> Detector:
    """Faster R-CNN on a ViT's simple pyramid."""
    return mask_rcnn(vit, classes, sizes, masks=False)


# What can stand on a ViT, by the name that a run and a file of weights have for it.
DETECTORS: dict[str, Callable[[VisionTransformer | AttentionTransfer, int, Sizes], Detector]] = {
    "fcos": fcos,
    "faster-rcnn": faster_rcnn,
    "mask-rcnn": mask_rcnn,
}
SIZES = {"vitdet": VITDET, "small": SMALL}


def detection_loss(model: nn.Module, images: Tensor, objects: ObjectBatch, recipe: Recipe) -> Tensor:
    """The sum of the heads' losses, and λ · transfer loss; noted as those of `student_loss` are, the heads'
    losses too."""
    output = model(images, objects)
    heads = [note(f"task_loss/{name}", loss) for name, loss in output.losses.items()]
    of_task, transfer_loss = note("task_loss", sum(heads)), note("transfer_loss", output.transfer_loss)
    return recipe.task_weight * of_task + recipe.transfer_weight * transfer_loss


def detect(model: nn.Module, images: ObjectImages, batch_size: int = 50) -> list[Found]:
    """What a detector says of all images in order, on the CPU. The model is left in the mode it was in."""
    device = next(model.parameters()).device
    with torch.no_grad(), in_eval_mode(model):
        results = [entry for batch, _ in images.loader(batch_size) for entry in model(batch.to(device)).found]
    return [Found(*(x if x is None else x.cpu() for x in entry)) for entry in results]


class _NoBackbone(nn.Identity):
    """Where torchvision asks for a backbone, and only wants to know how wide it is."""

    def __init__(self, width: int):
        super().__init__()
        self.out_channels = width


def _image_list(images: Tensor) -> ImageList:
    return ImageList(images, [tuple(images.shape[-2:])] * len(images))


def _to_learn(objects: ObjectBatch, first: int) -> list[dict[str, Tensor]]:
    """The objects without crowds in torchvision's form, their classes counted from `first`."""
    learned = []
    for boxes, labels, masks, crowd in objects:
        learned.append({"boxes": boxes[~crowd], "labels": labels[~crowd] + first})
        if masks is not None:
            learned[-1]["masks"] = masks[~crowd].to(torch.uint8)
    return learned
