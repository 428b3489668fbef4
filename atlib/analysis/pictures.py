"""Images side by side, as a matplotlib Figure that is neither shown nor saved here."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from torch import Tensor


def image_grid(pixels: Tensor, titles: Sequence[str] = (), columns: int = 8) -> Figure:
    """Images (n, 3, height, width), uint8 or float in [0, 1], side by side in rows of `columns`."""
    rows = -(-len(pixels) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(1.15 * columns, 1.35 * rows), squeeze=False, layout="constrained"
    )
    for index, axis in enumerate(axes.flat):
        axis.axis("off")
        if index < len(pixels):
            axis.imshow(np.asarray(pixels[index]).transpose(1, 2, 0))
            axis.set_title(titles[index] if index < len(titles) else "", fontsize=9)
    plt.close(figure)  # a notebook shows it once, as the value of its cell
    return figure
