"""Which images of a data set: a share of every class, a long tail of classes, groups of classes, and the
images that a reference model gets wrong."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from atfamily.measures.checks import check_labels, check_scores
from atlib.data import Images
from atlib.evaluate import Evaluation, evaluate, predict


class Filtered(NamedTuple):
    """`images` that `reference` gets wrong; `evaluate_filtered` keeps the reference itself out of the
    comparison."""

    images: Images
    reference: nn.Module


def class_counts(images: Images) -> list[int]:
    """The number of images of every class."""
    check_labels(images.targets, len(images), name="targets")
    return torch.bincount(images.targets, minlength=len(images.classes)).tolist()


def long_tail(images: Images, factor: float, seed: int = 0) -> Images:
    """A long-tailed choice of the images: class i of C keeps n_0 · factor^(-i / (C - 1)) of them, rounded
    down.

    A class that has fewer than its share keeps all it has. `seed` chooses the images, which stay in their
    order; with the same seed a larger factor chooses among those of a smaller. Source: Cao et al. 2019,
    "Learning Imbalanced Datasets with Label-Distribution-Aware Margin Loss" (arXiv 1906.07413).
    """
    counts = class_counts(images)
    if not (factor >= 1 and math.isfinite(factor)):
        raise ValueError(f"the imbalance factor must be at least 1 (1: balanced) and finite, got {factor}")
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    kept = []
    for label, count in enumerate(counts):
        # 1e-9: 5000 · 100^(-1) must be 50 although its factors are not exact in binary.
        keep = min(count, math.floor(counts[0] * factor ** (-label / (len(counts) - 1)) + 1e-9))
        if keep == 0:
            raise ValueError(f"class {label} would have none of its {count} images: a smaller factor")
        kept.append(order[images.targets[order] == label][:keep])
    return images.select(torch.cat(kept).sort().values)


MANY, FEW = 100, 20  # training images of a class, as in arXiv 1904.05160


def class_groups(counts: Sequence[int], many: int = MANY, few: int = FEW) -> dict[str, list[int]]:
    """Classes by their number of training images: "many" (more than `many`), "medium", "few" (fewer than
    `few`). `counts` has one number a class. A group without a class is left out. Source: Liu et al. 2019,
    "Large-Scale Long-Tailed Recognition in an Open World" (arXiv 1904.05160)."""
    groups = {"many": [], "medium": [], "few": []}
    for label, count in enumerate(counts):
        groups["many" if count > many else "few" if count < few else "medium"].append(label)
    return {name: classes for name, classes in groups.items() if classes}


def group_accuracy(logits: Tensor, labels: Tensor, groups: Mapping[str, Sequence[int]]) -> dict[str, float]:
    """Accuracy on every group of classes: the mean over its classes of the share of their images that are
    right. logits: (n, classes); labels: (n,). A class without a test image does not count, and a group
    without any is left out."""
    check_scores(logits, "logits")
    check_labels(labels, *logits.shape)
    if unknown := {label for classes in groups.values() for label in classes} - {*range(logits.shape[1])}:
        raise ValueError(f"groups name class {min(unknown)}, logits have {logits.shape[1]}")
    right = (logits.argmax(1) == labels).double()
    accuracy = {}
    for name, classes in groups.items():
        shares = [right[labels == label].mean().item() for label in classes if (labels == label).any()]
        if shares:
            accuracy[name] = sum(shares) / len(shares)
    return accuracy


def adversarially_filtered(images: Images, reference: nn.Module, batch_size: int = 500) -> Filtered:
    """The images that a fixed reference model gets wrong, with that model: the adversarial filtration behind
    ImageNet-A.

    Its own accuracy there is 0 by construction. No augmentation is applied while judging. Source: Hendrycks
    et al. 2021, "Natural Adversarial Examples" (arXiv 1907.07174), without its checks by hand.
    """
    class_counts(images)  # says what is wrong with other targets
    logits = predict(reference, images.with_augment(None), batch_size)
    check_scores(logits, "what the reference model predicts")
    wrong = logits.argmax(1) != images.targets
    return Filtered(images.select(wrong.nonzero()[:, 0]), reference)


def evaluate_filtered(model: nn.Module, filtered: Filtered, batch_size: int = 500) -> Evaluation:
    """Accuracy and loss of `model` on adversarially filtered images."""
    a, b = model.state_dict(), filtered.reference.state_dict()
    if a.keys() == b.keys() and all(torch.equal(value.cpu(), b[name].cpu()) for name, value in a.items()):
        raise ValueError("the images were filtered with this model: leave it out of the comparison")
    return evaluate(model, filtered.images, batch_size)


def accuracy_on(logits: Tensor, labels: Tensor, classes: Sequence[int] | None = None) -> float:
    """Share of images whose largest logit, among those of `classes` (None: all), is a right one. logits: (n,
    all classes). labels: class indices (n,), or the set of right classes, bool (n, all classes), as ReaL has
    them."""
    wanted = logits.shape if labels.dtype == torch.bool else logits.shape[:1]
    if labels.shape != wanted or len(labels) == 0:
        raise ValueError(f"labels are (n,) or bool (n, classes), got {labels.dtype} {tuple(labels.shape)}")
    check_scores(logits, "logits")
    classes = list(range(logits.shape[1]) if classes is None else classes)
    if len(set(classes)) < 2 or not 0 <= min(classes) <= max(classes) < logits.shape[1]:
        raise ValueError(f"classes {classes}: at least two, of {logits.shape[1]} outputs")
    compared = torch.tensor(classes)
    best = logits[:, compared].argmax(1, keepdim=True)
    # (n, compared)
    right = labels[:, compared] if labels.dtype == torch.bool else labels[:, None] == compared
    missing = ~right.any(1)
    if missing.any():
        raise ValueError(f"image {missing.int().argmax()} has no right class among the {len(compared)}")
    return right.gather(1, best).double().mean().item()
