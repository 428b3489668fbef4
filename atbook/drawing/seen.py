"""What the drawings show of the worlds: one scene of Match and its routing twin, where the recorded teacher
looks in them, and what recorded students answer."""

from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from atbook.records import results_folder
from atbook.worlds import glyph_images, glyphs
from atlib import walk
from atlib.attention import Instead
from atlib.checkpoint import load_vit

# A test scene whose key and glyph are apart and look unlike each other, and whose Copy student is right.
SCENE = 22
# The layers of this teacher in which its class token looks at the key, and at the glyph that is asked for.
LOOKS = {1: "the key", 3: "its glyph"}


class Seen(NamedTuple):
    """A picture, what the teacher makes of it, and what the scene holds."""

    #: uint8 (3, 32, 32), without noise.
    image: np.ndarray
    #: The same as a model gets it, (1, 3, 32, 32).
    batch: torch.Tensor
    #: The name of the glyph that is asked for.
    shape: str
    #: Its cell, counted row by row.
    cell: int
    #: The key's cell.
    key: int
    #: The teacher's maps, one (H, N, N) a layer.
    maps: list[np.ndarray]

    def looks(self, layer: int) -> np.ndarray:
        """The class token's row on the patch grid (4, 4), each patch by the head that gives it most."""
        return self.maps[layer][:, 0, 1:].max(0).reshape(glyphs.GRID, glyphs.GRID)


@cache
def scene(twin: str | None = None, task: str = "match") -> Seen:
    """The scene of the drawings, or a twin of it; Find's has no key, its cell is -1."""
    drawn = glyphs.generate("test", SCENE + 1, world=glyphs.World(task, noise=0.0), twin=twin)
    images, _ = glyph_images(drawn).take([SCENE])
    with torch.no_grad():
        layers = walk(_model("teacher", task), images).layers
    shape = glyphs.SHAPES[drawn.shape[SCENE]]
    cell, key = int(drawn.cell[SCENE]), int(drawn.key[SCENE])
    return Seen(drawn.images[SCENE], images, shape, cell, key, [layer.map[0].numpy() for layer in layers])


def looks_of(method: str, sees: Seen, task: str) -> np.ndarray:
    """As `Seen.looks` in the last layer, where a recorded student, seed 0, makes its own maps."""
    with torch.no_grad():
        row = walk(_model(method, task), sees.batch).layers[-1].map[0, :, 0, 1:].amax(0)
    return row.view(glyphs.GRID, glyphs.GRID).numpy()


def answer(method: str, sees: Seen, maps_of: Seen | None = None) -> str:
    """The shape that a recorded student of Match, seed 0, names in a picture, with the teacher's maps of
    `maps_of` in place of its own where they are given."""
    instead = {}
    if maps_of is not None:
        instead = {i: Instead(map=torch.from_numpy(p)[None]) for i, p in enumerate(maps_of.maps)}
    with torch.no_grad():
        return glyphs.SHAPES[int(walk(_model(method), sees.batch, replace=instead).logits.argmax())]


@cache
def _model(method: str, task: str = "match") -> torch.nn.Module:
    return load_vit(results_folder() / "transfer" / task / f"{method}-seed0.safetensors").eval()
