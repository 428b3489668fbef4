"""Exercises of chapter 9, When the images change."""

from collections.abc import Callable, Sequence
from math import log

import numpy as np
import torch
from scipy.special import expit, logit
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from atbook.exercises.inputs import normal, vit
from atbook.exercises.judging import Exercise, told
from atfamily.measures.robustness import effective_robustness, fit_line
from atlib import walk
from atlib.attention import Instead

# --- 9.1 ---


def both(plain: float, first: float, second: float) -> float:
    """The accuracy under two shifts, if their losses add up on the logit axis."""
    return expit(logit(first) + logit(second) - logit(plain)).item()


def by_odds(plain: float, first: float, second: float) -> float:
    """The same: odds are multiplied."""
    of_plain, of_first, of_second = (a / (1 - a) for a in (plain, first, second))
    odds = of_first * of_second / of_plain
    return odds / (1 + odds)


# --- 9.2 ---


def chance_corrected(ordinary: list[float], shifted: list[float], classes: int) -> dict[str, float]:
    """The line of a pool whose accuracies are corrected for guessing."""

    def above(a: float) -> float:
        return (a - 1 / classes) / (1 - 1 / classes)

    return line([(above(a), above(b)) for a, b in zip(ordinary, shifted) if min(above(a), above(b)) > 0])


def line(pool: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Least squares on logit axes."""
    fitted = fit_line(*zip(*pool))
    return {"members": len(pool), "slope": fitted.slope, "intercept": fitted.intercept}


def clipped(ordinary, shifted, classes):
    """A member at or below chance was moved to 0.01, which is an invented point that pulls the line. Leave
    such members out, and say how many are left."""
    above = ((np.array([ordinary, shifted]) - 1 / classes) / (1 - 1 / classes)).clip(0.01)
    return line([*zip(*above.tolist())])


def one_axis(ordinary, shifted, classes):
    """Only the shifted accuracies were corrected. Chance is chance on both axes."""
    above = [(b - 1 / classes) / (1 - 1 / classes) for b in shifted]
    return line([(a, b) for a, b in zip(ordinary, above) if b > 0])


# --- 9.3 ---


def maps_of(vit: VisionTransformer, images: Tensor) -> list[Tensor]:
    """A ViT's maps, layer by layer."""
    return [seen.map for seen in walk(vit, images).layers]


def with_maps(vit: VisionTransformer, images: Tensor, maps: dict[int, Tensor]) -> Tensor:
    """The logits of images that are read with these maps; other layers make their own."""
    return walk(vit, images, replace={i: Instead(map=p) for i, p in maps.items()}).logits


def by_layer(vit: VisionTransformer, clean: Tensor, shifted: Tensor, chosen: Callable) -> list[Tensor]:
    """For each layer, the logits of shifted images with maps chosen from {layer: map} of both."""
    old, new = (dict(enumerate(maps_of(vit, images))) for images in (clean, shifted))
    return [with_maps(vit, shifted, chosen(old, new, i)) for i in new]


def repaired(vit: VisionTransformer, clean: Tensor, shifted: Tensor) -> list[Tensor]:
    """The logits of shifted images with one layer's map from the clean images and all other maps held: a list
    over layers."""
    return by_layer(vit, clean, shifted, lambda old, new, i: new | {i: old[i]})


# --- 9.4 ---

Pool = list[float]


def left_out(ordinary: Pool, shifted: Pool) -> list[float]:
    """Each member's points above the line of the others."""
    points = []
    for i in range(len(ordinary)):
        pool = [accuracies[:i] + accuracies[i + 1 :] for accuracies in (ordinary, shifted)]
        points.append(100 * effective_robustness(ordinary[i], shifted[i], *pool, samples=20).value)
    return points


def by_leverage(ordinary: Pool, shifted: Pool) -> np.ndarray:
    """The same from one fit: a residual, divided by 1 minus its leverage, is the residual from the line of
    the others."""
    x, y = logit(ordinary), logit(shifted)
    slope, intercept = np.polyfit(x, y, 1)
    leverage = 1 / len(x) + (x - x.mean()) ** 2 / ((x - x.mean()) ** 2).sum()
    return 100 * (expit(y) - expit(y - (y - slope * x - intercept) / (1 - leverage)))


def lines_of_others(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The value that the line of the others expects of each member, on the given axes."""
    expected = []
    for i in range(len(x)):
        slope, intercept = np.polyfit(np.delete(x, i), np.delete(y, i), 1)
        expected.append(intercept + slope * x[i])
    return np.array(expected)


def axes_exchanged(ordinary, shifted):
    """The line predicts the unshifted accuracy from the shifted one and was read backwards. Least squares is
    not symmetric: fit the shifted logit by the unshifted one."""
    x, y, expected = logit(ordinary), logit(shifted), []
    for i in range(len(x)):
        slope, intercept = np.polyfit(np.delete(y, i), np.delete(x, i), 1)
        expected.append((x[i] - intercept) / slope)
    return 100 * (expit(y) - expit(expected))


EXERCISES = (
    Exercise(
        "9.1",
        subject="logit axes",
        right=both,
        cases={
            "a mild and a hard shift": lambda: (0.95, 0.9, 0.7),
            "two hard ones": lambda: (0.8, 0.35, 0.3),
            "one that helps": lambda: (0.76, 0.85, 0.6),
        },
        also_right=(by_odds,),
        wrong={
            "You added losses in points. Two shifts that cost 45 and 50 points of 80 would leave less"
            " than nothing: add them on the logit axis.": lambda plain, first, second: first + second - plain,
            "You multiplied the shares of accuracy that are left. That"
            " is the sum on the axis of log a; the task asks for the sum"
            " on that of the logit, log(a / (1 - a)).": lambda plain, first, second: first * second / plain,
            "The logits of the two accuracies were added, not their losses: the logit without a shift has to"
            " be subtracted once.": lambda plain, first, second: expit(logit(first) + logit(second)).item(),
            "That is a logit. Bring it back to an accuracy: 1 / (1"
            " + exp(-x)).": lambda plain, first, second: (logit(first) + logit(second) - logit(plain)).item(),
            "The logits have base 10, and the way back has"
            " base e. Use one logarithm, the natural one.": lambda plain, first, second: expit(
                (logit(first) + logit(second) - logit(plain)) / log(10)
            ).item(),
        },
        see="Worse than what?",
    ),
    Exercise(
        "9.2",
        subject="effective robustness",
        right=chance_corrected,
        cases={
            "8 classes, a member below chance": lambda: (
                [0.6, 0.7, 0.8, 0.9, 0.95],
                [0.1, 0.3, 0.45, 0.6, 0.8],
                8,
            ),
            "4 classes, all above": lambda: ([0.55, 0.7, 0.8, 0.9], [0.3, 0.4, 0.6, 0.75], 4),
            "at chance, and below it without the shift": lambda: (
                [0.2, 0.25, 0.55, 0.7, 0.8, 0.9],
                [0.5, 0.4, 0.25, 0.4, 0.6, 0.75],
                4,
            ),
        },
        wrong={
            "You took 1 / (C - 1) for chance. Guessing among C classes is right 1/C of"
            " the time.": lambda ordinary, shifted, classes: chance_corrected(ordinary, shifted, classes - 1),
            "Members at chance are gone, but the others were not corrected: on this axis"
            " guessing has to be at 0, whose logit is minus infinity.": lambda ordinary, shifted, classes: (
                line([(a, b) for a, b in zip(ordinary, shifted) if b > 1 / classes])
            ),
            "Chance was subtracted and the rest not"
            " rescaled: a perfect model has to stay at 1.": lambda ordinary, shifted, C: line(
                [(a - 1 / C, b - 1 / C) for a, b in zip(ordinary, shifted) if b > 1 / C]
            ),
            **told(clipped, one_axis),
        },
        see="Worse than what?",
    ),
    Exercise(
        "9.3",
        subject="interventions",
        right=repaired,
        cases={
            "other images": lambda: (vit(4), normal(3, 3, 16, 16), normal(3, 3, 16, 16, seed=1)),
            "a noisy image": lambda: (
                vit(5),
                normal(2, 3, 16, 16, seed=2),
                normal(2, 3, 16, 16, seed=2) + 0.5 * normal(2, 3, 16, 16, seed=3),
            ),
        },
        wrong={
            "Later layers made new maps from repaired tokens, and so they were repaired"
            " as well. Hold all others at the maps of the shifted images.": lambda vit, clean, shifted: (
                [with_maps(vit, shifted, {i: p}) for i, p in enumerate(maps_of(vit, clean))]
            ),
            "Clean images were read with one map of the shifted"
            " ones: that breaks a layer. Start from the *shifted*"
            " images and put in a clean map.": lambda vit, clean, shifted: repaired(vit, shifted, clean),
            "Entry i has the clean maps of all layers up to i. Repair one layer"
            " at a time, or the last entry says nothing about the last layer.": lambda *given: by_layer(
                *given, lambda old, new, i: new | {j: old[j] for j in range(i + 1)}
            ),
            "You repaired all layers but one. That tells which layer's damage is enough by itself; the task"
            " asks which repair is.": lambda *given: by_layer(*given, lambda old, new, i: old | {i: new[i]}),
            "The clean maps were averaged over the batch. Scene b's map"
            " belongs to scene b: the mean is a different intervention.": lambda *given: by_layer(
                *given, lambda old, new, i: new | {i: old[i].mean(0, keepdim=True).expand_as(old[i])}
            ),
        },
        see="Wrong place, or misread?",
        view=list,
    ),
    Exercise(
        "9.4",
        subject="effective robustness",
        right=left_out,
        cases={
            "seven students": lambda: (
                [0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95],
                [0.3, 0.42, 0.5, 0.52, 0.66, 0.7, 0.86],
            ),
            "one far from the others": lambda: ([0.5, 0.62, 0.71, 0.8, 0.97], [0.22, 0.35, 0.4, 0.55, 0.7]),
        },
        also_right=(by_leverage,),
        wrong={
            "These are shares, from 0 to 1. The task asks for points: 100 times"
            " as much.": lambda ordinary, shifted: [points / 100 for points in left_out(ordinary, shifted)],
            "The sign is turned round: above the line is more robust, so it is found"
            " less expected.": lambda ordinary, shifted: [-points for points in left_out(ordinary, shifted)],
            "One line for all: each member helps to draw the line that it is judged"
            " by, which pulls its own verdict towards 0. Fit again without it.": lambda ordinary, shifted: (
                [100 * (b - fit_line(ordinary, shifted).expected(a)) for a, b in zip(ordinary, shifted)]
            ),
            "The lines were fitted to accuracies as they are. A point"
            " near 95 % is not a point near 60 %: fit on logit axes.": lambda ordinary, shifted: (
                100 * (shifted - lines_of_others(np.array(ordinary), np.array(shifted)))
            ),
            "The difference was taken on the logit axis. Bring the expected"
            " value back to an accuracy first; the answer is in points.": lambda ordinary, shifted: (
                logit(shifted) - lines_of_others(logit(ordinary), logit(shifted))
            ),
            **told(axes_exchanged),
        },
        see="Worse than what?",
        view=lambda result: torch.as_tensor(result, dtype=torch.float64),
    ),
)
