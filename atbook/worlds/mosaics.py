"""Find with photographs: nine small photographs in a grid, one of them in a frame, whose class is the label.

Between the glyphs, where all is known, and photographs, where nothing is: where a network has to look is
known here (the frame), and what it sees there is a real photograph. Photographs come from a pool, such as
CIFAR-10's, so that each split of mosaics has photographs of its own.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from atlib._util import require_known
from atlib.data import Images

SIDE, CELL, FRAME = 3, 16, 255  # cells a side, pixels a cell's side, level of the frame
CELLS = SIDE * SIDE
TWINS = ("routing", "message", "unrelated")


class Mosaics(NamedTuple):
    """n mosaics and the choices behind them."""

    #: uint8 (n, 3, 48, 48)
    images: Tensor
    #: the class of the framed photograph, int64 (n,)
    labels: Tensor
    #: its cell, counted row by row, int64 (n,)
    cells: Tensor
    #: the framed photograph without its frame, uint8 (n, 3, 16, 16)
    clean: Tensor


def draw_mosaics(photographs: Images, size: int, seed: int, twin: str | None = None) -> Mosaics:
    """`size` mosaics of a seed, from photographs (n, 3, 16, 16), or a twin of each.

    A "routing" twin has the frame at the same place and other photographs everywhere. A "message" twin has
    another photograph of the label's class, in a frame at another place, among other photographs. An
    "unrelated" twin is another mosaic. Raises `ValueError` for an unknown twin, and for photographs of
    another size.
    """
    if photographs.pixels.shape[1:] != (3, CELL, CELL):
        raise ValueError(f"photographs are {tuple(photographs.pixels.shape[1:])}, (3, {CELL}, {CELL}) needed")
    generator = torch.Generator().manual_seed(seed)
    which, cells = _draw(generator, len(photographs), size)
    if twin is not None:
        require_known("twin", twin, TWINS)
        labels = photographs.targets[which[torch.arange(size), cells]]
        generator = torch.Generator().manual_seed(seed + 1_000_003 * (1 + TWINS.index(twin)))
        which, elsewhere = _draw(generator, len(photographs), size)
        if twin == "message":
            # never the same place
            elsewhere = (cells + torch.randint(1, CELLS, (size,), generator=generator)) % CELLS
            which[torch.arange(size), elsewhere] = _of_class(photographs.targets, labels, generator)
        cells = cells if twin == "routing" else elsewhere
    return _compose(photographs, which, cells)


def mosaic_images(drawn: Mosaics, classes: tuple[str, ...]) -> Images:
    """Mosaics with the class of the framed photograph."""
    return Images(drawn.images, drawn.labels, classes)


def mosaic_retrieval(drawn: Mosaics) -> Images:
    """The retrieval pre-text: the target is the framed photograph without its frame, (768,), levels in
    [0, 1]."""
    return Images(drawn.images, drawn.clean.flatten(1).float() / 255)


def _draw(generator: torch.Generator, photographs: int, size: int) -> tuple[Tensor, Tensor]:
    """Which photograph is in each cell, (size, 9), and which cell has the frame, (size,)."""
    which = torch.randint(photographs, (size, CELLS), generator=generator)
    return which, torch.randint(CELLS, (size,), generator=generator)


def _of_class(targets: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
    """For each label one photograph of that class, (n,)."""
    chosen = torch.empty_like(labels)
    for label in labels.unique():
        (places,) = torch.where(targets == label)
        rows = labels == label
        chosen[rows] = places[torch.randint(len(places), (int(rows.sum()),), generator=generator)]
    return chosen


def _compose(photographs: Images, which: Tensor, cells: Tensor) -> Mosaics:
    size, rows = len(cells), torch.arange(len(cells))
    pixels = photographs.pixels[which]  # (n, 9, 3, 16, 16)
    named = which[rows, cells]
    clean = photographs.pixels[named]
    pixels[rows, cells] = _framed(pixels[rows, cells])
    grid = pixels.unflatten(1, (SIDE, SIDE)).permute(0, 3, 1, 4, 2, 5)
    images = grid.reshape(size, 3, SIDE * CELL, SIDE * CELL)
    return Mosaics(images, photographs.targets[named], cells, clean)


def _framed(photographs: Tensor) -> Tensor:
    """Photographs (n, 3, 16, 16) whose outermost pixels are white."""
    framed = torch.full_like(photographs, FRAME)
    framed[..., 1:-1, 1:-1] = photographs[..., 1:-1, 1:-1]
    return framed
