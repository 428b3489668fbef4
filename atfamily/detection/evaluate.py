"""Average precision of a detector on images in COCO's form, on one process or many."""

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from accelerate.utils import gather_object

from atfamily.detection.detector import Detector
from atfamily.detection.objects import Found
from atfamily.detection.precision import annotated_precision, annotations
from atlib._util import in_eval_mode
from atlib.loading import in_order

if TYPE_CHECKING:
    from atrun.data.coco import CocoObjects

# What `Precision` calls its figures, and a record.
FIGURES = {"ap": "AP", "ap50": "AP50", "ap75": "AP75", "small": "APs", "medium": "APm", "large": "APl"}


def evaluate_detector(model: Detector, images: "CocoObjects", batch_size: int = 16) -> dict[str, float]:
    """COCO's figures in [0, 1] of what a detector says of all images, in their own pixels: {"box_AP": ...,
    "box_AP50": ...} and, where it has masks, {"mask_AP": ...}; what there is nothing to find of is left out.

    Where Accelerate has started several processes every one must call it; the first has the figures, the
    others {}.
    """
    rank, processes, masks = 0, 1, model.heads.masks
    if dist.is_available() and dist.is_initialized():
        rank, processes = dist.get_rank(), dist.get_world_size()
    batches = in_order(len(images), batch_size)
    # One that is left without images looks at some that it does not count: where weights are divided, all
    # processes are needed.
    places = range(rank, -(-len(batches) // processes) * processes, processes)
    parts = [batches[place % len(batches)] for place in places]
    device = next(model.parameters()).device
    seen: list[tuple[int, list[dict], list[dict], list[dict], list[dict]]] = []
    with torch.no_grad(), in_eval_mode(model):
        for place, part, (batch, _) in zip(places, parts, images.batches(parts)):
            predictions = model(batch.to(device)).found
            for number, prediction in zip(part, predictions if place < len(batches) else []):
                predicted = images.back(number, Found(*(x if x is None else x.cpu() for x in prediction)))
                true = images.original(number)
                outlined = (annotations(objects, True) if masks else [] for objects in (predicted, true))
                true_boxes = [box | area for box, area in zip(annotations(true, False), images.areas(number))]
                seen.append((number, annotations(predicted, False), true_boxes, *outlined))
    if processes > 1:
        seen = gather_object(seen)
    if rank != 0:
        return {}
    seen.sort(key=lambda image: image[0])
    figures = {"box": annotated_precision([(boxes, true) for _, boxes, true, _, _ in seen])}
    if masks:
        figures["mask"] = annotated_precision([(outlines, true) for *_, outlines, true in seen], masks=True)
    return {
        f"{what}_{FIGURES[name]}": value
        for what, precision in figures.items()
        for name, value in precision._asdict().items()
        if value == value  # NaN: there was nothing to find
    }
