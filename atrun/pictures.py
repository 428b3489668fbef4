"""Where teacher and student look in the same few images: a picture of a model in training."""

import io

import torch
from matplotlib import rc_context
from matplotlib.figure import Figure
from torch import Tensor, nn

from atfamily.measures.pictures import coloured, first_middle_last, image_grid, looked_at
from atlib._util import in_eval_mode
from atlib.attention import walk
from atlib.attention_transfer import AttentionTransfer
from atlib.pair import student_of


def maps_picture(model: nn.Module, images: Tensor) -> Figure:
    """Where the class token looks in images (n, 3, height, width), mean over heads, in the first, the middle
    and the last transferred layer: a row for each image, with the teacher's maps, as the student is taught
    them, and then the student's.

    Without a class token it is the mean over all queries. Each map has a scale of its own, from 0 to its
    largest share. A model that is not taught maps has the student's columns alone, of all its layers.
    """
    with torch.no_grad(), in_eval_mode(model):
        columns = _columns(model, images.to(next(model.parameters()).device))
    low, high = images.amin((1, 2, 3), keepdim=True), images.amax((1, 2, 3), keepdim=True)
    shown = (images - low) / (high - low).clamp(min=1e-6)  # whatever it was normalised by
    panels = [shown, *(coloured(seen.cpu(), images.shape[2:]) for seen in columns.values())]
    titles = ["image", *columns]
    return image_grid(torch.stack(panels, 1).flatten(0, 1), titles, columns=len(titles))


def as_file(figure: Figure, kind: str = "png", dpi: int = 100) -> bytes:
    """A figure as the content of a PNG or SVG file, which is the same for the same figure."""
    drawn, metadata = io.BytesIO(), dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "atlib"}):
        figure.savefig(drawn, format=kind, dpi=dpi, metadata=metadata if kind == "svg" else None)
    return drawn.getvalue()


def _columns(model: nn.Module, images: Tensor) -> dict[str, Tensor]:
    """What is drawn beside the images, {title: (n, rows, columns)}."""
    student = student_of(model)
    if not isinstance(model, AttentionTransfer) or model.plan.what != "map":
        student_layers = walk(student, images, head=False).layers
        some = first_middle_last(len(student_layers))
        return {f"student {layer}": looked_at(student, student_layers[layer].map) for layer in some}
    places = first_middle_last(len(model.layers))
    maps = model.teacher_maps(model.teacher_layers(images))  # of all layers: an average is over all
    student_layers = model.walk(images).layers
    pairs = [model.pairing.layers[place] for place in places]
    titles = [f"teacher {of}" if of == layer else f"teacher {of} for {layer}" for layer, of in pairs]
    return {title: looked_at(student, maps[place]) for title, place in zip(titles, places)} | {
        f"student {layer}": looked_at(student, student_layers[layer].map) for layer, _ in pairs
    }
