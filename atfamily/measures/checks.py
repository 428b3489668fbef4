"""What measures are given: features, scores, labels, probabilities."""

import torch
from torch import Tensor

from atlib.analysis import check_rows


def check_features(x: Tensor, name: str, rows: int = 2) -> None:
    """Raise `ValueError`, naming the argument, unless x is (n, p), finite, with `rows` rows and a column."""
    if x.ndim != 2 or x.shape[1] == 0 or len(x) < rows or not x.isfinite().all():
        raise ValueError(f"{name} is (rows, features), finite, at least {rows} and 1, got {tuple(x.shape)}")


def check_scores(scores: Tensor, name: str) -> None:
    """Raise `ValueError`, naming the argument, unless it is (n, C), not empty and without NaN."""
    if scores.ndim != 2 or 0 in scores.shape or scores.isnan().any():
        raise ValueError(f"{name} is (images, classes), at least 1, without NaN, got {tuple(scores.shape)}")


def check_labels(labels: Tensor, rows: int, classes: int | None = None, name: str = "labels") -> None:
    """Raise `ValueError`, naming the argument, unless it is (rows,) class indices, below `classes`."""
    if labels.shape != (rows,) or labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(f"{name} are class indices ({rows},), got {labels.dtype} {tuple(labels.shape)}")
    wrong = labels < 0 if classes is None else (labels < 0) | (labels >= classes)
    if wrong.any():
        raise ValueError(f"{name} holds {labels[wrong][0].item()}, which is none of {classes} classes")


def check_probabilities(p: Tensor, name: str) -> None:
    """Raise `ValueError`, naming the argument, unless p is (n, C) with rows of probabilities."""
    check_scores(p, name)
    check_rows(p, f"{name}: row")
