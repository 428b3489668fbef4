"""Scenes: several glyphs of any size anywhere in a 64 x 64 image, for tasks that ask *where*.

In `atbook.worlds.glyphs` a cell is a patch, and the task names one glyph of an image. Here two to five glyphs
of 12 to 28 pixels lie anywhere: a ViT with patches of 8 pixels sees each of them in pieces, beside pieces of
others. The tasks ask for every object of a scene: its class, its box, its pixels. A hidden patch can be
foretold from the other patches of its object, so a masked auto-encoder has something to learn here.

Everything that varies is a field of `SceneWorld`. As in the other worlds all random choices are made first,
in a fixed order that no field influences, and only then is the image rendered.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from atbook.worlds.glyphs import BITMAPS, PAINTED, SHAPES, SPLITS, blurred, hsv_to_rgb, to_bytes
from atbook.worlds.ranges import require_ranges
from atfamily.detection.objects import ObjectImages, Objects
from atlib._util import require_known
from atlib.data import Images

SIZE = 64  # pixels per side
MOST = 8  # objects that a scene has room for
CHUNK = 100  # scenes per random stream: the first n scenes of a split are the same whatever its size
ATTEMPTS = 20  # places that are tried for an object


@dataclass(frozen=True)
class SceneWorld:
    """The factors of variation; the defaults are the distribution that models are trained on.

    Levels are in [0, 1], where 1 is white. Raises `ValueError` for a value outside its range.
    """

    #: Standard deviation of the pixel noise.
    noise: float = 0.1
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
    #: How deep stripes cut the glyphs, across, down or along a diagonal.
    texture: float = 0.0
    #: The fewest objects of a scene; an object that finds no free place is left out.
    fewest: int = 2
    #: The most objects of a scene.
    most: int = 5
    #: The smallest side of a glyph's square, in pixels.
    smallest: int = 12
    #: The largest side of a glyph's square, in pixels.
    largest: int = 28
    #: The largest intersection over union of two objects' squares; smaller ones lie in front.
    overlap: float = 0.0

    def __post_init__(self):
        sides, numbers = (6, SIZE), (1, MOST)
        whole = {"fewest": numbers, "most": numbers, "smallest": sides, "largest": sides}
        require_ranges(self, PAINTED | {"overlap": (0, 0.3)}, whole)
        for low, high in (("fewest", "most"), ("smallest", "largest")):
            if getattr(self, low) > getattr(self, high):
                raise ValueError(
                    f"SceneWorld({low}={getattr(self, low)}, {high}={getattr(self, high)}): {low} is above"
                    f" {high}"
                )


class Scenes(NamedTuple):
    """n generated scenes and what is in them; the objects with the largest squares come first."""

    #: uint8 (n, 3, 64, 64).
    images: np.ndarray
    #: The class of each object, -1 where there is none, int64 (n, 8).
    shape: np.ndarray
    #: The left, top, right and bottom edge of its visible pixels, so that right - left is its width (0 where
    #: there is none), float32 (n, 8, 4).
    boxes: np.ndarray
    #: 1 + the number of the object that a pixel belongs to, 0 for none, uint8 (n, 64, 64).
    instances: np.ndarray


class _Choices(NamedTuple):
    """Every random choice of n scenes, for eight objects each; shares are in [0, 1]."""

    # How many objects there are, as a share of the way from the fewest to the most, (n,).
    number: np.ndarray
    # The side of an object's square, as a share of the way from the smallest to the largest, (n, 8).
    side: np.ndarray
    # The places that are tried for it, as shares of the room there is, (n, 8, attempts, 2).
    place: np.ndarray
    # Its class, (n, 8).
    shape: np.ndarray
    # Its hue in turns of the colour circle, (n, 8).
    hue: np.ndarray
    # Its brightness, (n, 8).
    shade: np.ndarray
    # Which of four kinds of stripes cut it, (n, 8).
    stripes: np.ndarray
    # Of each pixel, (n, 3, 64, 64).
    noise: np.ndarray


def generate_scenes(split: str, size: int, seed: int = 0, world: SceneWorld = SceneWorld()) -> Scenes:
    """Draw the first `size` scenes of a split of the world.

    The splits of `atbook.worlds.glyphs.SPLITS` come from separate random streams, as do different seeds. The
    same (split, seed) with another `world` gives the same scenes with only the changed factors different.
    Raises `ValueError` for an unknown split and for a size below 1.
    """
    require_known("split", split, SPLITS)
    if size < 1:
        raise ValueError(f"size must be at least 1, got {size}")
    chunks = []
    for index in range(-(-size // CHUNK)):
        # a stream of its own: the worlds of one cell a patch have three numbers, this one has four
        choices = _draw(np.random.default_rng([seed, SPLITS.index(split), index, 64]))
        chunks.append(_render(world, choices))
    return Scenes(*(np.concatenate(parts)[:size] for parts in zip(*chunks)))


def scene_images(drawn: Scenes) -> Images:
    """Generated scenes with one label an image: the shape of the object whose visible box is the largest."""
    width_height = drawn.boxes[..., 2:] - drawn.boxes[..., :2]
    largest = width_height.prod(-1).argmax(1)
    labels = drawn.shape[np.arange(len(largest)), largest]
    return Images(torch.from_numpy(drawn.images), torch.from_numpy(labels), SHAPES)


def _draw(rng: np.random.Generator) -> _Choices:
    """Every choice, always in this order and always the same number of them."""
    n = CHUNK
    return _Choices(
        number=rng.uniform(size=n),
        side=rng.uniform(size=(n, MOST)),
        place=rng.uniform(size=(n, MOST, ATTEMPTS, 2)),
        shape=rng.integers(len(SHAPES), size=(n, MOST)),
        hue=rng.uniform(size=(n, MOST)),
        shade=rng.uniform(0.6, 1.0, size=(n, MOST)),
        stripes=rng.integers(4, size=(n, MOST)),
        noise=rng.standard_normal((n, 3, SIZE, SIZE), dtype=np.float32),
    )


def _placed(world: SceneWorld, choices: _Choices) -> tuple[np.ndarray, np.ndarray]:
    """The squares' upper left corners and sides, int64 (n, 8, 2) and (n, 8), the side 0 where there is no
    object. Objects take their places in turn; each takes the first attempt that leaves the others alone."""
    n, rows = len(choices.number), np.arange(len(choices.number))
    wanted = world.fewest + np.floor(choices.number * (world.most - world.fewest + 1)).astype(int)
    side = world.smallest + np.floor(choices.side * (world.largest - world.smallest + 1)).astype(int)
    corner, taken = np.zeros((n, MOST, 2), dtype=int), np.zeros((n, MOST), dtype=int)
    for new in range(MOST):
        room = SIZE - side[:, new] + 1
        # (n, attempts, 2)
        tried = np.floor(choices.place[:, new] * room[:, None, None]).astype(int)
        free = np.ones(tried.shape[:2], dtype=bool)
        for old in range(new):
            placed, length = corner[:, old, None], taken[:, old, None, None]
            shared = np.minimum(tried + side[:, new, None, None], placed + length) - np.maximum(tried, placed)
            both = shared.clip(0).prod(-1)  # squared pixels
            union = side[:, new, None] ** 2 + taken[:, old, None] ** 2 - both
            free &= both <= world.overlap * union
        first = free.argmax(1)
        exists = free.any(1) & (new < wanted)
        corner[:, new], taken[:, new] = tried[rows, first], np.where(exists, side[:, new], 0)
    return corner, taken


def _render(world: SceneWorld, choices: _Choices) -> Scenes:
    n = len(choices.number)
    corner, side = _placed(world, choices)
    colour = hsv_to_rgb((choices.hue + world.hue_shift) % 1.0, world.saturation, choices.shade)  # (n, 8, 3)
    image = np.full((n, 3, SIZE, SIZE), world.background, dtype=np.float32)
    instances = np.zeros((n, SIZE, SIZE), dtype=np.uint8)
    shape, boxes = np.full((n, MOST), -1), np.zeros((n, MOST, 4), dtype=np.float32)
    for scene in range(n):
        # the largest first: what is painted later lies in front
        order = [i for i in np.argsort(-side[scene], kind="stable") if side[scene, i] > 0]
        for number, i in enumerate(order):
            (left, top), length = corner[scene, i], side[scene, i]
            ink = _ink(choices.shape[scene, i], length)
            place = np.s_[top : top + length, left : left + length]
            depth = 1 - world.texture * _stripes(choices.stripes[scene, i], length)
            painted = world.background + depth * (colour[scene, i][:, None, None] - world.background)
            window = image[scene][:, *place]
            window[:, ink] = painted[:, ink]
            instances[scene][place][ink] = number + 1
        visible = 0
        for number, i in enumerate(order):
            down, across = np.nonzero(instances[scene] == number + 1)
            if len(down) == 0:  # hidden by objects in front of it: not there, then
                continue
            instances[scene][down, across] = visible + 1
            shape[scene, visible] = choices.shape[scene, i]
            boxes[scene, visible] = across.min(), down.min(), across.max() + 1, down.max() + 1
            visible += 1
    if world.blur > 0:
        image = blurred(image, world.blur)
    image = 0.5 + world.contrast * (image - 0.5) + world.noise * choices.noise
    return Scenes(to_bytes(image), shape, boxes, instances)


def _ink(shape: int, side: int) -> np.ndarray:
    """A glyph of that many pixels a side: bool (side, side)."""
    pick = np.arange(side) * 6 // side
    return BITMAPS[shape][np.ix_(pick, pick)]


def _stripes(kind: int, side: int) -> np.ndarray:
    """1 where stripes of a kind cut a glyph, (side, side): two pixels wide and two apart."""
    row, column = np.indices((side, side))
    return ((row, column, row + column, row - column)[kind] // 2 % 2).astype(np.float32)


def scene_objects(drawn: Scenes) -> ObjectImages:
    """Generated scenes with all that is in them."""
    objects = []
    for shape, boxes, instances in zip(drawn.shape, drawn.boxes, drawn.instances):
        k = int((shape >= 0).sum())
        masks = torch.from_numpy(instances)[None] == torch.arange(1, k + 1)[:, None, None]
        labels = torch.from_numpy(shape[:k].copy())
        objects.append(Objects(torch.from_numpy(boxes[:k].copy()), labels, masks, torch.zeros(k).bool()))
    return ObjectImages(torch.from_numpy(drawn.images), objects, SHAPES)
