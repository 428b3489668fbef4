"""Accuracy of a model on a set of images."""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from atlib.data.sampler import EvaluationData
from atlib.pair import check_normalisation, student_of
from atlib.train.objectives import outputs


class Evaluation(NamedTuple):
    """accuracy: share of images whose largest logit is the label's; loss: mean cross-entropy in nats; count:
    images."""

    accuracy: float
    loss: float
    count: int


def predict(model: nn.Module, images: EvaluationData, batch_size: int = 500) -> Tensor:
    """Logits (n, classes) of all images in order, on the CPU. The model runs in eval mode and is left in the
    mode it was in. Raises `ValueError` for images that are normalised otherwise than a pair was told."""
    check_normalisation(model, images)
    if len(images) == 0:
        raise ValueError(f"there are no images to evaluate in this {type(images).__name__}")
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            parts = [
                outputs(model, batch.to(device)).logits.float().cpu()
                for batch, _ in images.loader(batch_size)
            ]
    finally:
        model.train(training)
    return torch.cat(parts)


def evaluate(model: nn.Module, images: EvaluationData, batch_size: int = 500) -> Evaluation:
    """Accuracy and loss of `model` on `images`.

    Raises `ValueError` for a model without a class head, with fewer outputs than there are classes, or with
    logits that are NaN.
    """
    _check_head(model)
    return score(predict(model, images, batch_size), images.targets)


def score(logits: Tensor, labels: Tensor) -> Evaluation:
    """Accuracy and loss of logits (n, classes), as `predict` gives them, against labels (n,). Raises as
    `evaluate` does."""
    _check_labels(labels, logits)
    nan = logits.isnan().any(1)
    if nan.any():  # their argmax would count as a prediction
        raise ValueError(
            f"the model's logits are NaN for {nan.sum().item()} of {len(nan)} images, the first of them image"
            f" {nan.int().argmax().item()}: look for NaN in its weights, and in its teacher's where it"
            " needs one"
        )
    return Evaluation(
        (logits.argmax(1) == labels).double().mean().item(),
        nn.functional.cross_entropy(logits, labels).item(),
        len(labels),
    )


def evaluate_together(model: nn.Module, images: EvaluationData, batch_size: int = 500) -> Evaluation:
    """`evaluate`, with the images divided among the processes that Accelerate has started; on one process it
    is `evaluate`.

    Every process must call it, and gets the result for all images. Each image is counted once: none is
    repeated to fill up a batch. Raises as `evaluate` does.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return evaluate(model, images, batch_size)
    check_normalisation(model, images)
    _check_head(model)
    labels, device, training = images.targets, next(model.parameters()).device, model.training
    starts, world = range(0, len(images), batch_size), dist.get_world_size()
    sums = torch.zeros(4, dtype=torch.float64)  # right, nats, images, images with NaN
    model.eval()
    try:
        with torch.no_grad():
            for place in range(dist.get_rank(), -(-len(starts) // world) * world, world):
                # One that is left without images runs some that it does not count: where weights are divided,
                # all processes are needed.
                start = starts[place % len(starts)]
                mine = range(start, min(start + batch_size, len(images)))
                batch, of_batch = images.take(mine)
                logits = outputs(model, batch.to(device)).logits.double().cpu()
                _check_labels(labels, logits)
                found = torch.stack(
                    [
                        (logits.argmax(1) == of_batch).sum(),
                        nn.functional.cross_entropy(logits, of_batch, reduction="sum"),
                        torch.tensor(len(mine)),
                        logits.isnan().any(1).sum(),
                    ]
                )
                sums += found if place < len(starts) else 0
    finally:
        model.train(training)
    sums = sums.to(device)
    dist.all_reduce(sums)
    right, nats, count, nan = sums.tolist()
    if nan:
        raise ValueError(
            f"the model's logits are NaN for {int(nan)} of {int(count)} images: look for NaN in its weights,"
            " and in its teacher's where it needs one"
        )
    return Evaluation(right / count, nats / count, int(count))


def _check_head(model: nn.Module) -> None:
    if getattr(student_of(model), "num_classes", None) == 0:
        raise ValueError(
            f"this {type(student_of(model)).__name__} has no class head (num_classes=0), so it says no class"
            " of an image: build it with num_classes=, and train it"
        )


def _check_labels(labels: Tensor, logits: Tensor) -> None:
    if labels.max() >= logits.shape[1]:
        raise ValueError(
            f"the data have label {labels.max().item()}, the model has only {logits.shape[1]} outputs: pass"
            " num_classes= when it is built, or evaluate on data with the classes that it was trained for"
        )


def shift_accuracies(model: nn.Module, sets: dict[str, EvaluationData]) -> dict[str, float]:
    """Accuracy of a model on every set, by the set's name."""
    return {name: evaluate(model, images).accuracy for name, images in sets.items()}
