"""All panels of the last layer as a picture in a file."""

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure

from atrun.looking.panels import outliers
from atrun.looking.preparation import Prepared
from atrun.looking.rows import Rows
from atrun.pictures import as_file


def panels_of(rows: Rows) -> dict[str, np.ndarray]:
    """What a figure shows of a model: {title: (rows, columns), or colours (rows, columns, 3)}, of the last
    layer that is kept, and of the first prefix token, or without one the middle of the queries."""
    layer, first, of_layer = rows.layers[-1][0], len(rows.tokens.prefix), rows.arrays()
    at = 0 if first else len(rows.queries) // 2
    attention_rows = {name: of_layer[f"layer {layer}/{name}"][at, first:] for name in rows.beside}
    panels = {"gradient": of_layer[f"layer {layer}/gradient"]}
    if rows.panels.norms is not None:
        norms = of_layer[f"layer {layer}/norms"][first:]
        count = int(outliers(norms).sum())
        panels |= {"components": of_layer[f"layer {layer}/components"] / 255}
        panels |= {f"norms, {count} outliers": norms}
    return {
        f"{name}, layer {layer}" if name == "mean" else name: values.unflatten(0, rows.tokens.grid).numpy()
        for name, values in (attention_rows | panels).items()
    }


def drawn(pictures: Mapping[str, Mapping[str, tuple[Rows, Prepared]]], kind: str) -> bytes:
    """A row for each picture and model: the photograph, then `panels_of`. kind: "png" or "svg"."""
    lines = [
        (f"{model}, {picture}", prepared.photograph, panels_of(rows))
        for picture, models in pictures.items()
        for model, (rows, prepared) in models.items()
    ]
    columns = 1 + max(len(panels) for *_, panels in lines)
    figure = Figure(figsize=(1.9 * columns, 2.2 * len(lines)), layout="constrained")
    axes = figure.subplots(len(lines), columns, squeeze=False)
    for axis in axes.flat:
        axis.axis("off")
    for line, (title, photograph, panels) in zip(axes, lines):
        for axis, (name, values) in zip(line, {title: np.asarray(photograph), **panels}.items()):
            axis.imshow(values, cmap="magma", vmin=0)
            axis.set_title(name, fontsize=8)
    return as_file(figure, kind, dpi=150)
