"""The built-in worlds: small data sets in which routing between tokens is the problem to solve.

A 32 x 32 image is a 4 x 4 grid of 8 x 8 cells, and a ViT with patch size 8 sees each cell as one token. Cells
hold one of eight glyphs in one of six hues. The label is the shape of one of them, and content must travel
from its token to the class token, past the distractors. Which one it is, is the task:

- *Find*: the glyph in the marked cell, the one with light dots in its four corners.
- *Match*: the only glyph in the hue of the *key*, a plain square in a bright frame somewhere else. The class
  token has to find the key, read its hue, find the glyph of that hue, and read its shape: two hops.

Everything that varies is a field of `World`. Images are drawn so that a field can be changed alone: all
random choices are made first, in a fixed order that no field influences, and only then is the image rendered.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from atbook.worlds.ranges import require_ranges
from atlib._util import require_known
from atlib.data import Images

GRID, CELL = 4, 8  # cells per side, pixels per cell
# the position of a name is part of its random stream: append only
SPLITS = ("train", "validation", "test", "unlabelled", "resample")
TASKS = ("find", "match")
# What a twin of a scene shares with it (`generate`): append only, as with SPLITS.
TWINS = ("routing", "message", "distractors", "unrelated")
RENDERINGS = ("filled", "inverted", "dotted")
CHUNK = 500  # images per random stream: the first n images of a split are the same whatever its size
# How many images a split has by default: as many as in the central experiment.
SIZES = {"train": 1000, "validation": 2000, "test": 4000, "unlabelled": 40_000, "resample": 4000}

_BITMAPS = {
    "plus": "..##.. ..##.. ###### ###### ..##.. ..##..",
    "ring": "###### #....# #....# #....# #....# ######",
    "cross": "#....# .#..#. ..##.. ..##.. .#..#. #....#",
    "tee": "###### ###### ..##.. ..##.. ..##.. ..##..",
    "ell": "##.... ##.... ##.... ##.... ###### ######",
    "wedge": "#..... ##.... ###... ####.. #####. ######",
    "bars": "###### ...... ###### ###### ...... ######",
    "cup": "##..## ##..## ##..## ##..## ###### ######",
}
SHAPES = tuple(_BITMAPS)
# 1 where a glyph has ink: bool (shapes, 6, 6)
BITMAPS = np.array([[[c == "#" for c in row] for row in bitmap.split()] for bitmap in _BITMAPS.values()])
# Stripes of a cell, 1 where they cut: across, down, and along both diagonals, each one pixel wide and one
# apart (two on the diagonals).
_ROW, _COLUMN = np.indices((CELL, CELL))
_STRIPES = np.stack([_ROW % 2, _COLUMN % 2, (_ROW + _COLUMN) // 2 % 2, (_ROW - _COLUMN) // 2 % 2]).astype(
    np.float32
)
# The mark of Find, and of Match the key's frame and the square inside: (8, 8), 1 where they are.
_DOTS, _FRAME, _SQUARE = np.zeros((3, CELL, CELL), dtype=np.float32)
_DOTS[[0, 0, -1, -1], [0, -1, 0, -1]] = 1
_FRAME[[0, -1], :] = _FRAME[:, [0, -1]] = 1
_SQUARE[2:-2, 2:-2] = 1
HUES = ("red", "yellow", "green", "cyan", "blue", "magenta")


# The ranges of the fields that say how a scene is painted, in all generated worlds.
PAINTED = {
    "noise": (0, 2),
    "background": (0, 1),
    "contrast": (0, 4),
    "blur": (0, 4),
    "saturation": (0, 1),
    "hue_shift": (-1, 1),
    "texture": (0, 1),
}


@dataclass(frozen=True)
class World:
    """The factors of variation; the defaults are the distribution that models are trained on.

    Levels are in [0, 1], where 1 is white. Raises `ValueError` for a value outside its range.
    """

    #: "find" or "match".
    task: str = "find"
    #: Standard deviation of the pixel noise.
    noise: float = 0.2
    #: Grey level behind the glyphs.
    background: float = 0.1
    #: Factor around mid-grey.
    contrast: float = 1.0
    #: Standard deviation of a Gaussian blur, in pixels.
    blur: float = 0.0
    #: 1 for full colour, 0 for grey.
    saturation: float = 1.0
    #: By how many turns of the colour circle all hues are off.
    hue_shift: float = 0.0
    #: Number of distractor glyphs, 0 to 15 (in Match one cell is the key's, so that 15 is 14).
    clutter: int = GRID * GRID - 1
    #: Brightness of the mark's dots, or of the key's frame, above the background.
    cue: float = 0.9
    #: Largest displacement of a glyph in its cell, in pixels.
    jitter: int = 1
    #: Size of the glyphs: 1 is 6 x 6 pixels.
    scale: float = 1.0
    #: "filled", "inverted" (a dark glyph in a coloured cell) or "dotted" (every other pixel of the glyph).
    rendering: str = "filled"
    #: Brightness of a false mark on another cell, which lacks the lower right dot.
    decoy: float = 0.0
    #: How deep stripes cut the glyphs, in one of four directions drawn for each glyph.
    texture: float = 0.0
    #: How many cells to the left of the named glyph the mark of Find is (from the first column to the last),
    #: so that no token holds both.
    pointer: int = 0
    #: How many pixels all cells lie further down and to the right (from the last row and column on to the
    #: first), so that no patch of a ViT is a cell.
    offset: int = 0

    def __post_init__(self):
        whole = {
            "clutter": (0, GRID * GRID - 1),
            "jitter": (0, 3),
            "pointer": (0, GRID - 1),
            "offset": (0, CELL - 1),
        }
        require_ranges(self, PAINTED | {"cue": (0, 1), "scale": (0.5, 1.34), "decoy": (0, 1)}, whole)
        require_known("rendering", self.rendering, RENDERINGS)
        require_known("task", self.task, TASKS)
        for name in ("decoy", "pointer"):
            if self.task == "match" and getattr(self, name) > 0:
                raise ValueError(
                    f"World({name}={getattr(self, name)!r}) is about the mark of 'find'; 'match' has none"
                )


class Glyphs(NamedTuple):
    """n generated images and the choices behind them."""

    #: uint8 (n, 3, 32, 32).
    images: np.ndarray
    #: The shape of the glyph that the label names, int64 (n,).
    shape: np.ndarray
    #: Its hue, int64 (n,).
    hue: np.ndarray
    #: Its cell, counted row by row, int64 (n,).
    cell: np.ndarray
    #: Its cell without noise, blur or contrast, uint8 (n, 3, 8, 8).
    clean: np.ndarray
    #: The key's cell in Match, -1 in Find, int64 (n,).
    key: np.ndarray


class _Scenes(NamedTuple):
    """Every random choice of n scenes of 16 cells."""

    # Where the named glyph is, (n,).
    cell: np.ndarray
    # The shape of a glyph in each cell, (n, 16).
    shape: np.ndarray
    # Its hue, (n, 16).
    hue: np.ndarray
    # What is added to its hue, in turns of the colour circle, (n, 16).
    hue_jitter: np.ndarray
    # Its brightness, (n, 16).
    shade: np.ndarray
    # Its displacement in the cell, as shares of what is allowed, (n, 16, 2).
    offset: np.ndarray
    # The cells with the lowest of these numbers hold a glyph, (n, 16).
    crowd: np.ndarray
    # Of each pixel, (n, 3, 32, 32).
    noise: np.ndarray
    # The cell of a false mark, (n,).
    decoy: np.ndarray
    # Which of four kinds of stripes cut a glyph, (n, 16).
    stripes: np.ndarray
    # The key's cell in Match, (n,).
    key: np.ndarray
    # How far a cell's hue is from the hue of the named glyph in Match, (n, 16).
    apart: np.ndarray


def generate(split: str, size: int, seed: int = 0, world: World = World(), twin: str | None = None) -> Glyphs:
    """Draw the first `size` images of a split of the world, or a twin of each.

    The splits "train", "validation", "test" and "unlabelled" come from separate random streams, as do
    different seeds. The same (split, seed) with another `world` gives the same scenes with only the changed
    factors different, and with `twin` the i-th image is a twin of the i-th scene. A "routing" twin has the
    same places and hues and other shapes: it tells where the named glyph of the scene is, and nothing of its
    shape. A "message" twin has the named glyph's shape in another scene: it tells what is asked for, and
    nothing of where. A "distractors" twin is the same scene with other glyphs around the named one, and the
    same pixel noise. An "unrelated" twin is another scene and tells neither.

    Raises `ValueError` for an unknown split or twin, for a size below 1, and for twins that differ in their
    distractors in a world without any.
    """
    require_known("split", split, SPLITS)
    if twin is not None:
        require_known("twin", twin, TWINS)
    if twin == "distractors" and world.clutter == 0:
        raise ValueError("twin='distractors', but World(clutter=0) has none: take 'routing' or 'message'")
    if size < 1:
        raise ValueError(f"size must be at least 1, got {size}")
    chunks = []
    for index in range(-(-size // CHUNK)):
        stream = [seed, SPLITS.index(split), index]
        scenes = _draw(np.random.default_rng(stream))
        if twin is not None:
            scenes = _twin(scenes, _draw(np.random.default_rng([*stream, 1 + TWINS.index(twin)])), twin)
        chunks.append(_render(world, scenes))
    return Glyphs(*(np.concatenate(parts)[:size] for parts in zip(*chunks)))


def glyph_images(drawn: Glyphs) -> Images:
    """Generated glyphs with the downstream label: the shape in the marked cell."""
    return Images(torch.from_numpy(drawn.images), torch.from_numpy(drawn.shape), SHAPES)


def marked_glyphs(split: str = "train", size: int | None = None, seed: int = 0) -> Images:
    """Labelled images of Find, `size` of them (None: as many as the split has in `SIZES`); the command line
    takes them as `--data atbook.worlds:marked_glyphs`. Raises `ValueError` for an unknown split."""
    require_known("split", split, SPLITS)
    return glyph_images(generate(split, SIZES[split] if size is None else size, seed))


def marked_cell(images: Tensor) -> Tensor:
    """Read off the pixels where the mark is: images (n, 3, 32, 32) of any level to the cell's number, int64
    (n,), counted row by row.

    It looks for the brightest four corners, which is no more than the mark's definition; a test holds its
    error below 1 in 1,000. Cells must be where `World(offset=0)` has them.
    """
    cells = images.reshape(-1, 3, GRID, CELL, GRID, CELL)
    # (n, 3, 4, 2, 4, 2): rows and columns 0 and 7 of each cell
    corners = cells[:, :, :, :: CELL - 1, :, :: CELL - 1]
    return corners.float().mean(dim=(1, 3, 5)).flatten(1).argmax(1)


def _draw(rng: np.random.Generator) -> _Scenes:
    """Every choice, always in this order and always the same number of them."""
    n, cells = CHUNK, GRID * GRID
    cell = rng.integers(cells, size=n)
    shape = rng.integers(len(SHAPES), size=(n, cells))
    hue = rng.integers(len(HUES), size=(n, cells))
    hue_jitter = rng.uniform(-0.04, 0.04, size=(n, cells))
    shade = rng.uniform(0.6, 1.0, size=(n, cells))
    offset = rng.uniform(size=(n, cells, 2))
    crowd = rng.uniform(size=(n, cells))
    noise = rng.standard_normal((n, 3, GRID * CELL, GRID * CELL), dtype=np.float32)
    # Drawn last, so that what came later leaves the older draws as they were.
    decoy = (cell + rng.integers(1, cells, size=n)) % cells  # never the marked cell itself
    stripes = rng.integers(len(_STRIPES), size=(n, cells))
    key = (cell + rng.integers(1, cells, size=n)) % cells
    apart = rng.integers(1, len(HUES), size=(n, cells))
    return _Scenes(cell, shape, hue, hue_jitter, shade, offset, crowd, noise, decoy, stripes, key, apart)


def _twin(scenes: _Scenes, other: _Scenes, what: str) -> _Scenes:
    """The twins of some scenes: what they do not share with them comes from `other` scenes."""
    rows = np.arange(len(scenes.cell))
    named = np.arange(GRID * GRID) == scenes.cell[:, None]
    match what:
        case "routing":
            return scenes._replace(shape=other.shape, noise=other.noise)
        case "message":
            shape = other.shape.copy()
            shape[rows, other.cell] = scenes.shape[rows, scenes.cell]
            return other._replace(shape=shape)
        case "unrelated":
            return other
    keep = {"cell", "key", "decoy", "noise"}
    mixed = {
        name: np.where(named[..., None] if drawn.ndim == 3 else named, drawn, redrawn)
        for name, drawn, redrawn in zip(_Scenes._fields, scenes, other)
        if name not in keep
    }
    return scenes._replace(**mixed)


def _render(world: World, scenes: _Scenes) -> Glyphs:
    n, rows, cell, key = CHUNK, np.arange(CHUNK), scenes.cell, scenes.key
    hue, crowd = scenes.hue.copy(), scenes.crowd.copy()
    crowd[rows, cell] = -1  # the named cell always holds a glyph; the `clutter` lowest of the others do too
    if world.task == "match":
        named = hue[rows, cell]
        hue = (named[:, None] + scenes.apart) % len(HUES)  # never the hue of the named glyph ...
        hue[rows, cell] = hue[rows, key] = named  # ... but for itself and the key
        crowd[rows, key] = 2  # and the key's cell never does
    present = crowd.argsort(1).argsort(1) <= world.clutter
    if world.task == "match":
        present[rows, key] = True
    move = np.floor(scenes.offset * (2 * world.jitter + 1)).astype(int)  # 0 ... 2 jitter
    # (n, 16, 8, 8)
    mask = _stamps(world)[scenes.shape, move[..., 0], move[..., 1]] * present[..., None, None]
    turns = (hue / len(HUES) + scenes.hue_jitter + world.hue_shift) % 1.0
    colour = hsv_to_rgb(turns, world.saturation, scenes.shade)  # (n, 16, 3)
    if world.rendering == "inverted":
        mask = present[..., None, None] * (1 - mask)
    if world.texture > 0:
        mask = mask * (1 - world.texture * _STRIPES[scenes.stripes])
    if world.task == "match":
        mask[rows, key] = _SQUARE
    # (n, 16, 3, 8, 8)
    pixels = world.background + mask[:, :, None] * (colour[..., None, None] - world.background)
    lit = world.background + world.cue * (1 - world.background)
    at, sign = (key, _FRAME) if world.task == "match" else (_left(cell, world.pointer), _DOTS)
    pixels[rows, at] = pixels[rows, at] * (1 - sign) + lit * sign
    if world.decoy > 0:
        false = _DOTS.copy()
        false[-1, -1] = 0
        level = world.background + world.decoy * (1 - world.background)
        at = _left(scenes.decoy, world.pointer)
        pixels[rows, at] = pixels[rows, at] * (1 - false) + level * false

    clean = pixels[rows, cell]
    image = pixels.reshape(n, GRID, GRID, 3, CELL, CELL).transpose(0, 3, 1, 4, 2, 5)
    image = image.reshape(n, 3, GRID * CELL, GRID * CELL)
    image = np.roll(image, (world.offset, world.offset), (2, 3))
    if world.blur > 0:
        image = blurred(image, world.blur)
    image = 0.5 + world.contrast * (image - 0.5) + world.noise * scenes.noise
    shape = scenes.shape[rows, cell]
    where = key if world.task == "match" else np.full(n, -1)
    return Glyphs(to_bytes(image), shape, hue[rows, cell], cell, to_bytes(clean), where)


def _left(cell: np.ndarray, steps: int) -> np.ndarray:
    """The cell some steps to the left in the same row, from the first column on to the last."""
    return cell // GRID * GRID + (cell - steps) % GRID


def _stamps(world: World) -> np.ndarray:
    """Every glyph at every displacement inside its cell: (shapes, 2 jitter + 1, 2 jitter + 1, 8, 8)."""
    size, steps = round(6 * world.scale), 2 * world.jitter + 1
    pick = (np.arange(size) * 6) // size
    stamps = np.zeros((len(SHAPES), steps, steps, CELL, CELL), dtype=np.float32)
    for index, bitmap in enumerate(BITMAPS):
        glyph = bitmap[np.ix_(pick, pick)].astype(float)
        if world.rendering == "dotted":
            glyph *= np.add.outer(np.arange(size), np.arange(size)) % 2 == 0
        for row, column in np.ndindex(steps, steps):
            canvas = np.zeros((CELL + 8, CELL + 8))  # a margin of 4, so that what leaves the cell is cut off
            top, left = (4 + (CELL - size) // 2 + step - world.jitter for step in (row, column))
            canvas[top : top + size, left : left + size] = glyph
            stamps[index, row, column] = canvas[4:-4, 4:-4]
    return stamps


def hsv_to_rgb(hue: np.ndarray, saturation: float, shade: np.ndarray) -> np.ndarray:
    """HSV to RGB, (..., 3), for hues in turns of the colour circle."""
    pure = np.clip(np.abs((hue[..., None] * 6 + np.array([0.0, 4.0, 2.0])) % 6 - 3) - 1, 0, 1)
    return (shade[..., None] * (1 - saturation + saturation * pure)).astype(np.float32)


def blurred(image: np.ndarray, sigma: float) -> np.ndarray:
    """Separable Gaussian blur over the last two axes, edges repeated."""
    radius = max(1, round(3 * sigma))
    kernel = np.exp(-0.5 * (np.arange(-radius, radius + 1) / sigma) ** 2)
    kernel = (kernel / kernel.sum()).astype(np.float32)
    for axis in (-1, -2):
        padding = [(0, 0)] * image.ndim
        padding[axis] = (radius, radius)
        windows = np.lib.stride_tricks.sliding_window_view(
            np.pad(image, padding, mode="edge"), 2 * radius + 1, axis=axis
        )
        image = windows @ kernel
    return image


def to_bytes(image: np.ndarray) -> np.ndarray:
    """Levels in [0, 1] as uint8 from 0 to 255; what lies outside is cut off."""
    return np.clip(np.rint(image * 255), 0, 255).astype(np.uint8)
