"""Exercises of page D5, Where things are."""

import torch
from torch import Tensor

from atbook.exercises.inputs import normal
from atbook.exercises.judging import Exercise, told

# --- D5.1 ---


def boxes_of(instances: Tensor) -> Tensor:
    """The boxes of the objects: their first row and column, and one after the last for the far edges."""
    boxes = []
    for i in range(1, int(instances.max()) + 1):
        down, across = (instances == i).nonzero().T
        boxes.append([across.min(), down.min(), across.max() + 1, down.max() + 1])
    return torch.tensor(boxes, dtype=torch.float32)


def by_projection(instances: Tensor) -> Tensor:
    """The same: which columns and which rows an object has, from the left and from the right."""
    masks = instances[None] == torch.arange(1, int(instances.max()) + 1)[:, None, None]
    edges = []
    for axis in (1, 2):  # rows away: left and right; columns away: top and bottom
        has = masks.any(axis).int()
        edges.append((has.argmax(1), has.shape[1] - has.flip(1).argmax(1)))
    (left, right), (top, bottom) = edges
    return torch.stack([left, top, right, bottom], dim=1).float()


def corner_and_size(instances):
    """You returned left, top, *width, height*, COCO's way of writing. Here the last two are the right and the
    bottom edge."""
    boxes = boxes_of(instances)
    return torch.cat([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], dim=1)


def scene(height: int, width: int, *objects: tuple[int, int, int, int]) -> tuple[Tensor]:
    """An instance map of rectangles (left, top, right, bottom) with a corner missing, later ones in front."""
    instances = torch.zeros(height, width, dtype=torch.long)
    for number, (left, top, right, bottom) in enumerate(objects, start=1):
        instances[top:bottom, left:right] = number
        if right - left > 1 < bottom - top:
            instances[top, left] = 0
    return (instances,)


# --- D5.2 ---


def beside_crowds(overlaps: Tensor, crowd: Tensor, threshold: float) -> list[int]:
    """What each prediction counts: free single objects are tried first, and then the crowds."""
    return _matched(overlaps, crowd, threshold)


def _matched(
    overlaps: Tensor,
    crowd: Tensor,
    threshold: float,
    *,
    once: bool = True,
    fallback: bool = True,
    crowd_says: int = -1,
    crowd_first: bool = False,
    crowd_once: bool = False,
) -> list[int]:
    free, left, verdicts = ~crowd, crowd.clone(), []
    for row in overlaps:
        single = row.where(free if fallback else ~crowd, torch.full_like(row, -1.0))
        best = single.argmax()
        ok = bool(single[best] >= threshold) and bool(free[best])
        many = row.where(left, torch.full_like(row, -1.0))
        in_crowd = bool(many.max() >= threshold)
        if ok and not (crowd_first and in_crowd):
            free[best] = not once
            verdicts.append(1)
        elif in_crowd:
            left[many.argmax()] = not crowd_once
            verdicts.append(crowd_says)
        else:
            verdicts.append(0)
    return verdicts


def predictions(threshold: float) -> tuple[Tensor, Tensor, float]:
    """Six predictions, the surest first; two single objects, and a crowd between them."""
    overlaps = torch.tensor(
        [
            [0.9, 0.1, 0.0],  # the first object
            [0.8, 0.0, 0.7],  # it is taken; the second one will do
            [0.2, 0.8, 0.0],  # in the crowd
            [0.1, 0.9, 0.6],  # in the crowd, too, and its object is taken
            [0.7, 0.3, 0.1],  # found before
            [0.0, 0.4, 0.3],  # nothing here
        ],
        dtype=torch.float64,
    )
    return overlaps, torch.tensor([False, True, False]), threshold


def an_object_in_a_crowd() -> tuple[Tensor, Tensor, float]:
    """Two predictions inside a crowd, of an object that was told apart from it."""
    overlaps = torch.tensor([[0.95, 0.6], [0.97, 0.8], [0.3, 0.1]], dtype=torch.float64)
    return overlaps, torch.tensor([True, False]), 0.5


# --- D5.3 ---

Objects = dict[str, Tensor]  # boxes and labels


def cut_out(boxes: Tensor, labels: Tensor, scale: float, corner: Tensor, side: float) -> Objects:
    """Boxes that are scaled, moved and clamped, without those that have no area left."""
    return _kept((scale * boxes - corner.repeat(2)).clamp(0, side), labels)


def _kept(boxes: Tensor, labels: Tensor) -> Objects:
    there = (boxes[:, 2:] > boxes[:, :2]).all(1)
    return {"boxes": boxes[there], "labels": labels[there]}


def not_cut(boxes, labels, scale, corner, side):
    """Boxes reach out of the square. Clamp all four edges to 0 and `side`."""
    moved = scale * boxes - corner.repeat(2)
    there = (moved.clamp(0, side)[:, 2:] > moved.clamp(0, side)[:, :2]).all(1)
    return {"boxes": moved[there], "labels": labels[there]}


def only_whole_ones(boxes, labels, scale, corner, side):
    """Objects that are only partly outside are gone. Cut them off; their visible part is still there to be
    found."""
    moved = scale * boxes - corner.repeat(2)
    there = ((moved >= 0) & (moved <= side)).all(1)
    return {"boxes": moved[there], "labels": labels[there]}


def boxes_in(size: float, scale: float, seed: int) -> tuple[Tensor, Tensor, float, Tensor, float]:
    """Six boxes of an image of `size`: one well inside what is cut out, one that reaches out, one outside,
    and others."""
    corner, side = torch.tensor([0.2, 0.45], dtype=torch.float64) * size * scale, 0.5 * size * scale
    fixed = size * torch.tensor(
        [[0.3, 0.5, 0.5, 0.7], [0.1, 0.3, 0.4, 0.6], [0.75, 0.1, 0.9, 0.3]], dtype=torch.float64
    )
    middle, reach = (
        size * (0.5 + 0.2 * normal(3, 2, seed=seed)),
        size * 0.1 * (0.5 + normal(3, 2, seed=seed + 1).abs()),
    )
    boxes = torch.cat([fixed, torch.cat([middle - reach, middle + reach], dim=1)])
    return boxes, torch.tensor([3, 1, 4, 1, 5, 2]), scale, corner, side


EXERCISES = (
    Exercise(
        "D5.1",
        subject="detection",
        right=boxes_of,
        cases={
            "two objects": lambda: scene(8, 10, (1, 2, 5, 6), (6, 3, 9, 8)),
            "one pixel, and at the border": lambda: scene(6, 9, (4, 1, 5, 2), (0, 3, 4, 6), (5, 0, 9, 5)),
        },
        also_right=(by_projection,),
        wrong={
            "Right and bottom are one too small. A pixel reaches from"
            " its number to the next: the far edge of the last pixel"
            " is its number + 1.": lambda instances: boxes_of(instances) - torch.tensor([0.0, 0.0, 1.0, 1.0]),
            "Top stands before left. Indices of a tensor are row and column;"
            " a box begins with the column, x.": lambda instances: boxes_of(instances)[:, [1, 0, 3, 2]],
            "There is a box too many, around the"
            " background. 0 is no object: begin with 1.": lambda instances: boxes_of(instances + 1),
            "There is one box around everything. Every number has a box of its own.": lambda instances: (
                boxes_of((instances > 0).long())
            ),
            **told(corner_and_size),
        },
    ),
    Exercise(
        "D5.2",
        subject="detection",
        right=beside_crowds,
        cases={
            "six predictions": lambda: predictions(0.5),
            "a high threshold": lambda: predictions(0.75),
            "an object in a crowd": an_object_in_a_crowd,
            "no crowd": lambda: (predictions(0.8)[0], torch.tensor([False, False, False]), 0.8),
            "two crowds": lambda: (predictions(0.7)[0], torch.tensor([True, True, False]), 0.7),
        },
        wrong={
            "An object was found twice, and both counted. The surest"
            " prediction takes it; a later one has to look for another"
            " object.": lambda overlaps, crowd, threshold: _matched(overlaps, crowd, threshold, once=False),
            "A prediction gave up because the object that it overlaps most was taken."
            " Ask which it overlaps most *of those that are free*.": lambda overlaps, crowd, threshold: (
                _matched(overlaps, crowd, threshold, fallback=False)
            ),
            "A prediction in a crowd counted as right. No annotation says what is in there: it is left out,"
            " -1.": lambda overlaps, crowd, threshold: _matched(overlaps, crowd, threshold, crowd_says=1),
            "A prediction in a crowd counted as wrong. It may"
            " well have found an object there: it is left out,"
            " -1.": lambda overlaps, crowd, threshold: _matched(overlaps, crowd, threshold, crowd_says=0),
            "A prediction that had found a single object was left out because"
            " it lies in a crowd. The single objects are asked first.": lambda overlaps, crowd, threshold: (
                _matched(overlaps, crowd, threshold, crowd_first=True)
            ),
            "The second prediction in a crowd counted as wrong. A crowd is many: it is never used"
            " up.": lambda overlaps, crowd, threshold: _matched(overlaps, crowd, threshold, crowd_once=True),
        },
    ),
    Exercise(
        "D5.3",
        subject="detection",
        right=cut_out,
        cases={"larger": lambda: boxes_in(64, 1.5, seed=0), "smaller": lambda: boxes_in(100, 0.4, seed=5)},
        wrong={
            "Boxes without area stayed. Whatever lies outside is clamped to a line or a point: it has"
            " to go, or the detector learns to find nothing.": lambda boxes, labels, scale, corner, side: (
                {"boxes": (scale * boxes - corner.repeat(2)).clamp(0, side), "labels": labels}
            ),
            "There are more labels than boxes."
            " A label goes with its box.": lambda boxes, labels, scale, corner, side: (
                cut_out(boxes, labels, scale, corner, side) | {"labels": labels}
            ),
            "You moved first and scaled then. The corner is given"
            " in pixels of the larger image: scale, then move.": lambda boxes, labels, scale, corner, side: (
                _kept((scale * (boxes - corner.repeat(2))).clamp(0, side), labels)
            ),
            "The boxes moved with the corner. When you"
            " cut at x, everything moves left by x.": lambda boxes, labels, scale, corner, side: _kept(
                (scale * boxes + corner.repeat(2)).clamp(0, side), labels
            ),
            "x and y of the corner were exchanged:"
            " left and right go with x, which is first.": lambda boxes, labels, scale, corner, side: cut_out(
                boxes, labels, scale, corner.flip(0), side
            ),
            **told(not_cut, only_whole_ones),
        },
    ),
)
