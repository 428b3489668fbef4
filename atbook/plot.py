"""Pure plotting functions: data in, a matplotlib Figure out. Nothing is shown or saved here.

Figures are closed for pyplot before they are returned, so that a notebook shows each once: as the value of
its cell.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from atfamily.measures.pictures import image_grid as image_grid

# Okabe and Ito's palette, whose colours readers with colour-blindness can tell apart; a method keeps its
# colour through the book.
COLOURS = {
    "scratch": "#999999",
    "fine-tune": "#009E73",
    "fine-tune attention": "#5BC8A8",
    "frozen probe": "#66A61E",
    "frozen MLP probe": "#3F6B12",
    "copy": "#0072B2",
    "copy-routing-twin": "#56B4E9",
    "copy-message-twin": "#D55E00",
    "copy-distractors-twin": "#3B528B",
    "copy-unrelated-twin": "#7A4988",
    "copy-same-class-twin": "#6A8FD0",
    "copy-other-class-twin": "#882255",
    "copy-blank-twin": "#444444",
    "copy-q": "#E69F00",
    "copy-k": "#B8860B",
    "copy-v": "#8B5A00",
    "copy-untrained": "#A0522D",
    "copy-fine-tuned": "#1B4F72",
    "distill": "#CC79A7",
    "distill-long": "#AA3377",
    "distill, tokens": "#5E3C99",
}

# Seeds this far apart (accuracies as shares), with none between them, are two kinds of outcome: a mean of
# both is the accuracy of no student.
GROUPS_APART = 0.4


def maps(map: Tensor, title: str = "", names: Sequence[str] = ()) -> Figure:
    """Attention maps (H, N, N), one panel per head: queries down, keys across, one colour scale for all."""
    shown = map.detach().float().cpu().numpy()
    figure, axes = _panels(len(shown), side=2.3)
    for index, (axis, p) in enumerate(zip(axes, shown)):
        picture = axis.imshow(p, vmin=0, vmax=shown.max(), cmap="viridis")
        axis.set(title=names[index] if index < len(names) else f"head {index}", xlabel="key")
    axes[0].set_ylabel("query")
    figure.colorbar(picture, ax=axes, shrink=0.8)
    figure.suptitle(title)
    return _done(figure)


def class_token_attention(
    image: Tensor, map: Tensor, grid: tuple[int, int], prefix_tokens: int = 1, title: str = ""
) -> Figure:
    """Where the class token looks: an image (3, height, width) beside its row of each head's map (H, N, N),
    laid out on the patch grid, in colours from 0 to 1 in every figure. The share that goes to prefix tokens
    (the class token itself) is written above each panel."""
    rows = map.detach().float().cpu()[:, 0]  # (H, N): the class token is query 0
    shares = rows[:, prefix_tokens:].reshape(len(rows), *grid).numpy()
    figure, axes = _panels(1 + len(rows), side=1.9)
    axes[0].imshow(np.asarray(image).transpose(1, 2, 0))
    axes[0].set_title("image", fontsize=9)
    for head, (axis, share) in enumerate(zip(axes[1:], shares)):
        picture = axis.imshow(share, vmin=0, vmax=1, cmap="magma")
        axis.set_title(f"head {head}\nclass token {rows[head, :prefix_tokens].sum():.2f}", fontsize=9)
    for axis in axes:
        axis.set(xticks=[], yticks=[])
    figure.colorbar(picture, ax=axes, shrink=0.8, pad=0.01, label="share", ticks=(0, 0.5, 1))
    figure.suptitle(title)
    return _done(figure)


def curves(
    histories: Mapping[str, Sequence[Mapping]],
    metric: str = "loss",
    label: str = "training loss",
    log: bool = False,
) -> Figure:
    """One line per run, labelled by name: `metric` against steps, for histories as `train` returns them."""
    lines = {
        name: [(entry["step"], entry[metric]) for entry in history if metric in entry]
        for name, history in histories.items()
    }
    for name, points in lines.items():
        if not points:
            has = ", ".join(dict.fromkeys(key for entry in histories[name] for key in entry))
            raise ValueError(f"the history of {name!r} has no {metric!r}; it has {has}")
    figure, axis = plt.subplots(figsize=(6, 3.4), layout="constrained")
    for name, points in lines.items():
        marker = "o" if len(points) < 12 else None
        axis.plot(*zip(*points), label=name, color=COLOURS.get(name), marker=marker, markersize=3)
    axis.set(xlabel="step", ylabel=label, yscale="log" if log else "linear")
    axis.legend(frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    return _done(figure)


def estimates(
    worlds: Mapping[str, Mapping[str, Any]], methods: Mapping[str, str], chance: float | Mapping[str, float]
) -> Figure:
    """Accuracies with their intervals and, as small dots, those of the single seeds: a row for each method, a
    panel for each world. Where two neighbouring seeds are more than `GROUPS_APART` apart, no seed is near the
    mean: such a row has its seeds alone, and says how many are in each of the two groups.

    worlds: {title of a panel: {method: what `atbook.lab.verdicts.accuracies` says of it}}, as shares; a
    method that a world does not have gets an empty row. methods: {method: its name in the figure}. chance:
    the accuracy of guessing, a dotted line; {title: chance} where worlds differ in it.
    """
    size = (4.6 + 2.4 * len(worlds), 0.42 * len(methods) + 1.1)
    figure, axes = plt.subplots(
        1, len(worlds), figsize=size, sharey=True, squeeze=False, layout="constrained"
    )
    for axis, (title, by_method) in zip(axes[0], worlds.items()):
        guessing = chance[title] if isinstance(chance, Mapping) else chance
        axis.axvline(100 * guessing, linestyle=":", color="#888888")
        for row, method in enumerate(methods):
            if method in by_method:
                accuracy = by_method[method]
                mean, low, high = 100 * accuracy.mean, 100 * accuracy.low, 100 * accuracy.high
                colour = COLOURS.get(method, "#333333")
                groups = two_groups(accuracy.of_seeds)
                for group in groups:
                    seeds = [100 * of_seed for of_seed in group]
                    axis.plot(seeds, [row] * len(seeds), "o", color=colour, markersize=5, alpha=0.6)
                    says, middle = f"{len(seeds)} of {len(accuracy.of_seeds)} seeds", sum(seeds) / len(seeds)
                    axis.annotate(
                        says, (middle, row), (0, 6), textcoords="offset points", ha="center", fontsize=8
                    )
                if groups:
                    continue
                axis.plot(
                    [low, high], [row, row], color=colour, linewidth=5, alpha=0.35, solid_capstyle="butt"
                )
                seeds = [100 * of_seed for of_seed in accuracy.of_seeds]
                axis.plot(seeds, [row + 0.27] * len(seeds), ".", color=colour, markersize=3.5, alpha=0.8)
                axis.plot(mean, row, "o", color=colour, markersize=7)
                axis.annotate(
                    f"{mean:.1f}", (mean, row), (0, 6), textcoords="offset points", ha="center", fontsize=8
                )
        axis.set(title=title, xlim=(0, 103), xlabel="test accuracy (%)")
        axis.grid(axis="x", alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0, 0].set(yticks=range(len(methods)), yticklabels=list(methods.values()))
    axes[0, 0].set_ylim(len(methods) - 0.5, -0.7)
    return _done(figure)


def two_groups(of_seeds: Sequence[float]) -> tuple[list[float], ...]:
    """The seeds below and above the widest gap between neighbours, where it is wider than `GROUPS_APART`;
    nothing otherwise."""
    seeds = sorted(of_seeds)
    gaps = [above - below for below, above in pairwise(seeds)]
    if not gaps or max(gaps) <= GROUPS_APART:
        return ()
    at = gaps.index(max(gaps)) + 1
    return seeds[:at], seeds[at:]


def kept_shares(shares: Mapping[str, Any]) -> Figure:
    """What share of Copy's gain students keep, with its interval: a row for each place, in per cent; 0 is
    scratch, 100 is Copy, and intervals are cut where the figure ends, at -30 and 130.

    shares: {name of the place: what `atbook.lab.shown.kept_share` says of it}.
    """
    figure, axis = plt.subplots(figsize=(7, 0.36 * len(shares) + 1.1), layout="constrained")
    for row, share in enumerate(shares.values()):
        ends = [100 * share.low, 100 * share.high]
        axis.plot(ends, [row, row], color=COLOURS["copy"], linewidth=5, alpha=0.35, solid_capstyle="butt")
        axis.plot(100 * share.value, row, "o", color=COLOURS["copy"])
    for end, name in ((0, "scratch"), (50, "half"), (100, "Copy")):
        axis.axvline(end, linestyle=":", color="#888888")
        axis.annotate(
            name, (end, 1.02), xycoords=("data", "axes fraction"), ha="center", fontsize=9, color="#888888"
        )
    axis.set(yticks=range(len(shares)), yticklabels=shares, ylim=(len(shares) - 0.5, -0.5))
    axis.set(xlabel="share of Copy's gain (%)", xlim=(-30, 130))
    return _done(figure)


def _panels(number: int, side: float) -> tuple[Figure, list[Axes]]:
    """A figure with a number of square panels, whose side is in inches: three in a row, which a phone can
    still show, and of four two."""
    columns = 2 if number == 4 else min(number, 3)
    rows = -(-number // columns)
    size = (side * columns + 0.7, (side + 0.3) * rows)
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    for axis in axes.flat[number:]:
        axis.remove()
    return figure, list(axes.flat[:number])


def _done(figure: Figure) -> Figure:
    plt.close(figure)
    return figure
