"""Find with photographs: what is framed gives the label, and what a twin shares."""

import numpy as np
import pytest
import torch

from atbook.worlds import mosaics
from atlib.data import Images

POOL = Images(
    torch.randint(255, (500, 3, 16, 16), generator=torch.Generator().manual_seed(0), dtype=torch.uint8),
    torch.arange(500) % 10,
    tuple("abcdefghij"),
)


def cells_of(image):
    """(9, 3, 16, 16), row by row."""
    return [image[:, 16 * (i // 3) :][:, :16, 16 * (i % 3) :][..., :16] for i in range(9)]


def read(image):
    """(the framed cell, the index in the pool of what is framed) from the pixels alone."""
    cells = cells_of(image)
    (place,) = (i for i, cell in enumerate(cells) if (cell[:, [0, -1]] == 255).all())
    inner = cells[place][:, 1:-1, 1:-1]
    (index,) = torch.where((POOL.pixels[:, :, 1:-1, 1:-1] == inner).flatten(1).all(1))[0].tolist()
    return place, index


def test_a_mosaic_can_be_read_off_its_pixels():
    drawn = mosaics.draw_mosaics(POOL, 40, 3)
    for image, cell, label, clean in zip(drawn.images, drawn.cells, drawn.labels, drawn.clean):
        place, index = read(image)
        assert (place, index % 10) == (cell, label) and torch.equal(clean, POOL.pixels[index])
    many = mosaics.draw_mosaics(POOL, 2000, 4)
    assert np.bincount(many.cells).min() > 170 and np.bincount(many.labels).min() > 150
    targets = mosaics.mosaic_retrieval(drawn).targets
    torch.testing.assert_close(targets.view(40, 3, 16, 16), drawn.clean / 255)


@pytest.mark.parametrize("twin, shared", [("routing", "cells"), ("message", "labels"), ("unrelated", None)])
def test_a_twin_shares_what_it_says_and_nothing_else(twin, shared):
    drawn, other = (mosaics.draw_mosaics(POOL, 400, 5, which) for which in (None, twin))
    pairs = {"cells": (drawn.cells, other.cells), "labels": (drawn.labels, other.labels)}
    equal = {name: (one == two).double().mean() for name, (one, two) in pairs.items()}
    for name, share in equal.items():
        assert share == 1 if name == shared else share < 0.2
    if twin == "message":
        assert equal["cells"] == 0
    assert all(read(image)[0] == cell for image, cell in zip(other.images, other.cells))
    assert (drawn.images == other.images).flatten(1).double().mean(1).max() < 0.3
