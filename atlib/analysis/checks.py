"""What every analysis refuses: values that are not finite, maps and probabilities that are none."""

import torch
from torch import Tensor

# How far a row may be from 1: far above the rounding of a softmax over thousands of keys, far below one key
# lost.
TOLERANCE, HALF_TOLERANCE = 1e-4, 1e-2


def check_maps(maps: Tensor, layer: int | None = None, name: str = "") -> None:
    """Raise `ValueError` unless `maps` are attention maps (B, H, N, N): finite, not negative, rows that sum
    to 1.

    The message names the head, the image and the query of the first bad row, and the layer and the argument's
    name where they are given.
    """
    where = "".join(f"{part}: " for part in (name, "" if layer is None else f"layer {layer}") if part)
    square = maps.ndim == 4 and maps.shape[-1] == maps.shape[-2]
    if not square or maps.numel() == 0 or not maps.is_floating_point():
        raise ValueError(
            f"{where}maps are (B, H, N, N) floating-point numbers, all sides at least 1, got"
            f" {tuple(maps.shape)} of {maps.dtype}"
        )
    half = torch.finfo(maps.dtype).bits < 32
    # A NaN or an infinity anywhere in a row shows in its sum.
    sums = maps.sum(-1, dtype=torch.float32 if half else maps.dtype)
    least = maps.amin(-1)
    _refuse_rows(
        ~sums.isfinite(), sums, where, "sums to {:.6g}: the model's weights or its images are not finite"
    )
    _refuse_rows(
        least < 0, least, where, "has the entry {:.6g}: pass maps, after the softmax, not attention logits"
    )
    _refuse_rows(
        (sums - 1).abs() > (HALF_TOLERANCE if half else TOLERANCE),
        sums,
        where,
        "sums to {:.6g}, not to 1: pass maps, after the softmax, and renormalise rows that lost keys"
        " (atlib.maps.keep_tokens)",
    )


def check_features(x: Tensor, name: str, rows: int = 2) -> None:
    """Raise `ValueError`, naming the argument, unless x is (n, p), finite, with `rows` rows and a column."""
    if x.ndim != 2:
        raise ValueError(f"{name} is (rows, features), got {tuple(x.shape)}: flatten it to rows first")
    if x.shape[1] == 0 or len(x) < rows:
        raise ValueError(f"{name} is {tuple(x.shape)}: at least {rows} rows and one feature are needed")
    if not x.isfinite().all():
        row, column = (~x.isfinite()).nonzero()[0].tolist()
        raise ValueError(f"{name} is {x[row, column].item()} in row {row}, feature {column}: leave it out")


def check_scores(scores: Tensor, name: str) -> None:
    """Raise `ValueError`, naming the argument, unless it is (n, C), not empty and without NaN."""
    if scores.ndim != 2 or 0 in scores.shape:
        raise ValueError(f"{name} is (images, classes), both at least 1, got {tuple(scores.shape)}")
    if scores.isnan().any():
        raise ValueError(f"{name} is NaN for image {scores.isnan().any(1).nonzero()[0].item()}")


def check_labels(labels: Tensor, rows: int, classes: int | None = None, name: str = "labels") -> None:
    """Raise `ValueError`, naming the argument, unless it is (rows,) class indices, below `classes`."""
    if labels.shape != (rows,) or labels.is_floating_point() or labels.dtype == torch.bool:
        got = f"{labels.dtype} {tuple(labels.shape)}"
        raise ValueError(f"{name} must be class indices ({rows},), one for each row, got {got}")
    wrong = labels < 0 if classes is None else (labels < 0) | (labels >= classes)
    if wrong.any():
        known = "from 0 on" if classes is None else f"0 to {classes - 1}, as the model has them"
        raise ValueError(f"{name} holds {labels[wrong][0].item()}: class indices are {known}")


def check_probabilities(p: Tensor, name: str) -> None:
    """Raise `ValueError`, naming the argument, unless p is (n, C) with rows of probabilities."""
    check_scores(p, name)
    sums = p.sum(1, dtype=torch.float64)
    half = p.is_floating_point() and torch.finfo(p.dtype).bits < 32
    wrong = ((sums - 1).abs() > (HALF_TOLERANCE if half else TOLERANCE)) | (p.amin(1) < 0)
    if wrong.any():
        row = wrong.nonzero()[0].item()
        raise ValueError(
            f"{name} holds no probabilities: row {row} sums to {sums[row].item():.6g}, its least entry is"
            f" {p[row].min().item():.6g}; turn logits into probabilities with .softmax(-1)"
        )


def as_double(x: Tensor) -> Tensor:
    """x in float64 and without gradients; on the CPU where its device has no float64 (Apple's GPUs)."""
    return x.detach().to("cpu" if x.device.type == "mps" else x.device, torch.float64)


def _refuse_rows(bad: Tensor, values: Tensor, where: str, problem: str) -> None:
    """Raise `ValueError` for the first row of the maps that is `bad`; bad and values: (B, H, N)."""
    if bad.any():
        b, h, i = bad.nonzero()[0].tolist()
        found = problem.format(values[b, h, i].item())
        raise ValueError(f"{where}head {h}: the row of query {i} in image {b} {found}")
