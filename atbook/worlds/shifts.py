"""Shifts of the built-in world: one factor of the generator at a time, on a severity dial, and sets that are
hard for a different reason.

Severity 0 is the distribution that models are trained on, severity 5 the hardest. Every shifted set shows the
scenes of the same split and seed, so that accuracies are compared image by image; the harder resample alone
is a new draw.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from atbook.worlds import glyph_images
from atbook.worlds.glyphs import RENDERINGS, Glyphs, World, generate
from atlib._util import require_known
from atlib.data import Images

HARDEST = 5.0
SEVERITIES = (1.0, 3.0, 5.0)  # those of the recorded evaluations
_TRAINED = {field.name: field.default for field in fields(World)}


class Shift(NamedTuple):
    """One way in which test images differ."""

    name: str
    #: (severity, split, size, seed) -> images.
    draw: Callable[[float, str, int, int], Glyphs]
    #: What changes, in words.
    says: str
    #: Its counterpart among natural images.
    like: str


def dialled(factor: str, hardest: float, severity: float) -> float:
    """The value of a factor of `World` on the straight way from its default to `hardest`; whole where the
    factor is."""
    start = _TRAINED[factor]
    value = start + (hardest - start) * severity / HARDEST
    return round(value) if isinstance(start, int) else value


def _factor(name: str, hardest: float, severity: float, split: str, size: int, seed: int) -> Glyphs:
    return generate(split, size, seed, replace(World(), **{name: dialled(name, hardest, severity)}))


def _rendered(severity: float, split: str, size: int, seed: int) -> Glyphs:
    """A share severity / 5 of the images drawn in another way, half of them inverted and half dotted."""
    ways = [generate(split, size, seed, World(rendering=rendering)) for rendering in RENDERINGS]
    lot = np.random.default_rng([seed, 7]).uniform(size=size) * HARDEST
    way = np.where(lot < severity, np.where(lot < severity / 2, 1, 2), 0)
    return Glyphs(*(np.stack(parts)[way, np.arange(size)] for parts in zip(*ways)))


def _harder(severity: float, split: str, size: int, seed: int) -> Glyphs:
    """New images of the same world, of which a share is kept: all at severity 0, the tenth with the faintest
    marked glyph at 5.

    A glyph counts as faint among those of its shape: shapes with few pixels are always fainter, and a choice
    among all would be a choice of shapes.
    """
    share = 1 - 0.9 * severity / HARDEST
    drawn = generate("resample", round(size / share), seed)
    # how much the glyph and its dots stand out, without noise
    contrast = np.abs(drawn.clean / 255 - World().background).mean((1, 2, 3))
    rank = np.empty(len(contrast))  # 0 for the faintest of its shape, up to 1 for the strongest
    for shape in np.unique(drawn.shape):
        same = np.flatnonzero(drawn.shape == shape)
        rank[same[np.argsort(contrast[same], kind="stable")]] = np.linspace(0, 1, len(same))
    kept = np.sort(np.argsort(rank, kind="stable")[:size])
    return Glyphs(*(part[kept] for part in drawn))


def _by_factor(name: str, factor: str, hardest: float, says: str, like: str = "ImageNet-C") -> Shift:
    return Shift(name, partial(_factor, factor, hardest), says, like)


SHIFTS = {
    shift.name: shift
    for shift in (
        _by_factor("background", "background", 0.35, "the grey behind the glyphs gets lighter"),
        _by_factor("colour", "saturation", 0.0, "colours fade to grey", "ImageNet-Sketch"),
        _by_factor(
            "hue", "hue_shift", 1 / 12, "all hues turn, at 5 to half-way between those known", "ImageNet-R"
        ),
        _by_factor("clutter", "clutter", 0, "fewer and fewer other glyphs"),
        _by_factor("cue", "cue", 0.4, "the mark gets fainter", "ImageNet-A"),
        _by_factor("position", "jitter", 3, "glyphs lie further from the middle of their cells"),
        _by_factor("scale", "scale", 0.5, "glyphs get smaller"),
        _by_factor("noise", "noise", 0.6, "more pixel noise"),
        _by_factor("blur", "blur", 0.8, "blur"),
        _by_factor("contrast", "contrast", 0.3, "less contrast"),
        Shift(
            "rendering",
            _rendered,
            "more and more images in which glyphs are inverted or dotted",
            "ImageNet-R",
        ),
        _by_factor(
            "conflicting cue", "decoy", 0.9, "a second, false mark of three dots gets brighter", "ImageNet-A"
        ),
        _by_factor(
            "texture",
            "texture",
            1.0,
            "stripes cut the glyphs: the shape is right, the texture was never seen",
            "texture against shape",
        ),
        Shift(
            "harder resample",
            _harder,
            "a new draw of the same world, of which the faintest of every shape are kept",
            "ImageNetV2",
        ),
    )
}


def shifted(name: str, severity: float, split: str = "test", size: int = 1000, seed: int = 0) -> Glyphs:
    """The first `size` images of a split under one of `SHIFTS`. Raises `ValueError` for an unknown name or a
    severity outside 0 to 5."""
    require_known("shift", name, SHIFTS)
    if not 0 <= severity <= HARDEST:
        raise ValueError(
            f"severity={severity!r} is out of range: it goes from 0, the distribution of training, to"
            f" {HARDEST:g}"
        )
    return SHIFTS[name].draw(severity, split, size, seed)


def shifted_images(
    name: str, severity: float, split: str = "test", size: int = 1000, seed: int = 0
) -> Images:
    """The images of `shifted` with the downstream label, the marked shape."""
    return glyph_images(shifted(name, severity, split, size, seed))


def key(name: str, severity: float) -> str:
    """The name of the accuracy on a shifted set in records: "noise@3"."""
    return f"{name}@{severity:g}"


def all_shifts(severities: Sequence[float] = SEVERITIES, size: int = 1000) -> dict[str, Images]:
    """Test images under every shift and severity, named by `key`, and "unshifted"."""
    sets = {"unshifted": glyph_images(generate("test", size))}
    return sets | {
        key(name, severity): shifted_images(name, severity, size=size)
        for name in SHIFTS
        for severity in severities
    }
