"""Average precision of predicted boxes: written out, and by COCO's own program."""

import contextlib
import io
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from atfamily.detection.objects import Found, Objects

# How much a predicted box must share with a true one to count: intersection over union.
THRESHOLDS = tuple(np.linspace(0.5, 0.95, 10).tolist())
# Where precision is read off, by the share of objects that are found.
RECALLS = np.linspace(0, 1, 101)
KEPT = 100  # predictions of an image and class that count, the surest first


def intersection_over_union(boxes: np.ndarray, others: np.ndarray) -> np.ndarray:
    """(n, 4) and (m, 4) to (n, m), in [0, 1]."""
    corner = np.maximum(boxes[:, None, :2], others[None, :, :2])
    opposite = np.minimum(boxes[:, None, 2:], others[None, :, 2:])
    shared = (opposite - corner).clip(0).prod(-1)
    areas = [(some[:, 2:] - some[:, :2]).prod(-1) for some in (boxes, others)]
    return shared / (areas[0][:, None] + areas[1][None] - shared)


def matched(overlaps: np.ndarray, threshold: float) -> np.ndarray:
    """Which of n predictions, the surest first, are right, bool (n,), by their overlaps (n, m) with m
    objects: each takes the object that it overlaps most of those that no surer one took, if that is at least
    the threshold."""
    right, taken = np.zeros(len(overlaps), bool), np.zeros(overlaps.shape[1], bool)
    for number, overlap in enumerate(overlaps):
        left = np.where(taken, -1.0, overlap)
        # the last of equals, as COCO's program takes it
        best = len(left) - 1 - left[::-1].argmax() if len(left) else 0
        if len(left) and left[best] >= min(threshold, 1 - 1e-10):
            right[number] = taken[best] = True
    return right


def area_under(right: np.ndarray, objects: int) -> float:
    """The average precision of predictions, the surest of all images first, of which some are `right`: at
    each share of the objects that is to be found, the best precision with which at least so many are found, 0
    where they never are."""
    true_positives = right.cumsum()
    recall, precision = true_positives / objects, true_positives / np.arange(1, len(right) + 1)
    best = np.maximum.accumulate(precision[::-1])[::-1]
    place = np.searchsorted(recall, RECALLS, side="left")
    return float(np.append(best, 0.0)[place].mean())


def average_precision(
    predictions: Sequence[Found], objects: Sequence[Objects], thresholds: Sequence[float] = THRESHOLDS
) -> float:
    """COCO's AP of boxes, in [0, 1]: the mean over thresholds and over the classes that occur; NaN where none
    does. The same as pycocotools where there is no crowd. Source: Lin et al. 2014, "Microsoft COCO" (arXiv
    1405.0312), and its evaluation code."""
    precisions = []
    for label in sorted({int(label) for image in objects for label in image.labels}):
        number, scores, overlaps = 0, [], []
        for predicted, true in zip(predictions, objects, strict=True):
            of_class, true_of_class = predicted.labels == label, true.labels == label
            order = np.argsort(-predicted.scores[of_class].double().numpy(), kind="stable")[:KEPT]
            boxes = predicted.boxes[of_class].double().numpy()[order]
            overlaps.append(intersection_over_union(boxes, true.boxes[true_of_class].double().numpy()))
            scores.append(predicted.scores[of_class].double().numpy()[order])
            number += int(true_of_class.sum())
        order = np.argsort(-np.concatenate(scores), kind="stable")
        for threshold in thresholds:
            right = np.concatenate([matched(overlap, threshold) for overlap in overlaps])
            precisions.append(area_under(right[order], number))
    return float(np.mean(precisions)) if precisions else float("nan")


class Precision(NamedTuple):
    """COCO's figures, in [0, 1]. ap: over thresholds 0.50 to 0.95; ap50, ap75: at one; small, medium, large:
    ap of the objects of a third of the sizes each, NaN where there are none."""

    ap: float
    ap50: float
    ap75: float
    small: float
    medium: float
    large: float


# COCO's own thirds, in squared pixels: up to 32 x 32, up to 96 x 96, and above.
COCO_SIZES = (32.0**2, 96.0**2)
# Of the objects of `SceneWorld()`, a third of which have at most so many pixels of their own each (of 6,285
# in 2,000 scenes: 48 to 613, thirds at 150 and 274). By COCO's they are all small.
SCENE_SIZES = (150.0, 274.0)


def coco_precision(
    predictions: Sequence[Found],
    objects: Sequence[Objects],
    *,
    masks: bool = False,
    sizes: tuple[float, float] = COCO_SIZES,
) -> Precision:
    """The figures of predicted boxes, or of predicted masks, by pycocotools (the extra "detection"). sizes:
    where the area of small objects ends, and that of medium ones, in squared pixels."""
    pairs = zip(predictions, objects, strict=True)
    images = ((annotations(predicted, masks), annotations(true, masks)) for predicted, true in pairs)
    return annotated_precision(images, masks=masks, sizes=sizes)


def annotated_precision(
    images: Iterable[tuple[list[dict], list[dict]]],
    *,
    masks: bool = False,
    sizes: tuple[float, float] = COCO_SIZES,
) -> Precision:
    """The figures of `coco_precision` from images as `annotations` writes them, (predicted, true) each: for
    images in numbers whose masks, pixel by pixel, are too many to hold."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    truth: dict[str, Any] = {"info": {}, "images": [], "annotations": []}
    detections: list[dict] = []
    for number, (predicted, true) in enumerate(images):
        packed = (one["segmentation"]["size"] for one in (*true, *predicted) if "segmentation" in one)
        height, width = next(packed, (0, 0))
        truth["images"].append({"id": number, "height": height, "width": width})
        for annotation in true:
            identified = {"id": len(truth["annotations"]) + 1, "image_id": number}
            truth["annotations"].append(annotation | identified)
        detections += [detection | {"image_id": number} for detection in predicted]
    labels = sorted({annotation["category_id"] for annotation in truth["annotations"]})
    truth["categories"] = [{"id": label} for label in labels]
    ranges = [[0, 1e10], [0, sizes[0]], [*sizes], [sizes[1], 1e10]]
    if not detections or not truth["annotations"]:
        areas = [one["area"] for one in truth["annotations"] if not one["iscrowd"]]
        none = [0.0 if any(a <= area <= b for area in areas) else float("nan") for a, b in ranges]
        return Precision(none[0], none[0], *none)
    for detection in detections if masks else ():
        del detection["bbox"]  # whose area would count
    with contextlib.redirect_stdout(io.StringIO()):  # it prints what it does
        coco = COCO()
        coco.dataset = truth
        coco.createIndex()
        evaluation = COCOeval(coco, coco.loadRes(detections), "segm" if masks else "bbox")
        evaluation.params.areaRng = ranges
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    # -1 is its word for nothing to find
    return Precision(*(float("nan") if value < 0 else float(value) for value in evaluation.stats[:6]))


def annotations(image: Found | Objects, masks: bool) -> list[dict]:
    """The objects of an image, or what is said of it, in COCO's form, with run lengths of the `masks` if they
    are asked for; the area is that of the mask, where there is one."""
    from pycocotools import mask as run_lengths

    in_coco_form = []
    for i, (box, label) in enumerate(zip(image.boxes.double().tolist(), image.labels.tolist())):
        left, top, right, bottom = box
        annotation = {"category_id": label, "bbox": [left, top, right - left, bottom - top]}
        annotation["area"] = (right - left) * (bottom - top)
        if isinstance(image, Found):
            annotation["score"] = float(image.scores[i])
        else:
            annotation["iscrowd"] = int(image.crowd[i])
        if image.masks is not None:
            packed = run_lengths.encode(np.asfortranarray(image.masks[i].numpy().astype(np.uint8)))
            annotation["area"] = float(run_lengths.area(packed))
            if masks:
                annotation["segmentation"] = packed
        in_coco_form.append(annotation)
    return in_coco_form
