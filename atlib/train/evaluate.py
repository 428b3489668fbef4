"""Accuracy of a model on a set of images."""

from typing import NamedTuple

import torch
import torch.distributed as dist
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from atlib._util import in_eval_mode
from atlib.data.sampler import EvaluationData
from atlib.data.torch_data import as_data
from atlib.pair import check_normalisation, student_of
from atlib.train.objectives import outputs


class Evaluation(NamedTuple):
    """accuracy: share of images whose largest logit is the label's; loss: mean cross-entropy in nats; count:
    images."""

    accuracy: float
    loss: float
    count: int


# What an accuracy is measured on; of torch's own kinds as in `atlib.data.torch_data`.
Labelled = EvaluationData | Dataset | DataLoader


def predict(model: nn.Module, images: Labelled, batch_size: int = 500) -> Tensor:
    """Logits (n, classes) of all images in order, on the CPU. The model runs in eval mode and is left in the
    mode it was in. Raises `ValueError` for images that are normalised otherwise than a pair was told."""
    return _predicted(model, as_data(images), batch_size)[0]


def evaluate(model: nn.Module, images: Labelled, batch_size: int = 500) -> Evaluation:
    """Accuracy and loss of `model` on `images`: what `atlib.data` opens, or a torch `Dataset` of (image,
    label), or its `DataLoader`, whose batch size gives way to `batch_size`.

    Raises `ValueError` for a model without a class head, with fewer outputs than there are classes, or with
    logits that are NaN or infinite, and for images without a label.
    """
    _check_head(model)
    return score(*_predicted(model, as_data(images), batch_size))


def _predicted(model: nn.Module, images: EvaluationData, batch_size: int) -> tuple[Tensor, Tensor]:
    """What `predict` returns, and the labels (n,)."""
    check_normalisation(model, images)
    if len(images) == 0:
        raise ValueError(f"there are no images to evaluate in this {type(images).__name__}")
    like = next(model.parameters())
    logits, labels = [], []
    with torch.no_grad(), in_eval_mode(model):
        for batch, of_batch in images.loader(batch_size):
            logits.append(outputs(model, batch.to(like.device, like.dtype)).logits.float().cpu())
            labels.append(of_batch.cpu())
    return torch.cat(logits), torch.cat(labels)


def score(logits: Tensor, labels: Tensor) -> Evaluation:
    """Accuracy and loss of logits (n, classes), as `predict` gives them, against labels (n,). Raises as
    `evaluate` does."""
    _check_labels(labels, logits)
    wrong = says_nothing(logits)
    if wrong.any():  # their argmax would count as a prediction
        raise ValueError(
            f"the model's logits are NaN or infinite for {wrong.sum().item()} of {len(wrong)} images, the"
            f" first of them image {wrong.int().argmax().item()}: look for NaN in its weights"
        )
    return Evaluation(
        (logits.argmax(1) == labels).double().mean().item(),
        nn.functional.cross_entropy(logits, labels).item(),
        len(labels),
    )


def says_nothing(logits: Tensor) -> Tensor:
    """Which rows of logits (n, classes) have no probabilities, bool (n,): those with NaN or infinity. Minus
    infinity rules a class out, and may stand in a row with others."""
    return ~logits.logsumexp(1).isfinite()


def evaluate_together(model: nn.Module, images: Labelled, batch_size: int = 500) -> Evaluation:
    """`evaluate`, with the images divided among the processes that Accelerate has started; on one process it
    is `evaluate`.

    Every process must call it, and gets the result for all images. Each image is counted once: none is
    repeated to fill up a batch. Raises as `evaluate` does.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return evaluate(model, images, batch_size)
    _check_head(model)
    images = as_data(images)
    check_normalisation(model, images)
    if len(images) == 0:
        raise ValueError(f"there are no images to evaluate in this {type(images).__name__}")
    like, parts = next(model.parameters()), []
    starts, world = range(0, len(images), batch_size), dist.get_world_size()
    with torch.no_grad(), in_eval_mode(model):
        for place in range(dist.get_rank(), -(-len(starts) // world) * world, world):
            # One that is left without images runs some that it does not count: where weights are divided,
            # all processes are needed.
            start = starts[place % len(starts)]
            batch, labels = images.take(range(start, min(start + batch_size, len(images))))
            logits = outputs(model, batch.to(like.device, like.dtype)).logits.float().cpu()
            if place < len(starts):
                parts.append((start, logits, labels.cpu()))
    parts = sorted(gather_object(parts), key=lambda part: part[0])
    return score(*(torch.cat(each) for each in list(zip(*parts))[1:]))


def _check_head(model: nn.Module) -> None:
    if getattr(student_of(model), "num_classes", None) == 0:
        raise ValueError(
            f"this {type(student_of(model)).__name__} has no class head (num_classes=0): build it"
            f" with num_classes="
        )


def _check_labels(labels: Tensor, logits: Tensor) -> None:
    if labels.ndim != 1 or labels.is_floating_point():
        raise ValueError(
            f"labels must be class indices, int64 (n,), got {labels.dtype} {tuple(labels.shape)}"
        )
    if labels.min() < 0 or labels.max() >= logits.shape[1]:
        raise ValueError(
            f"labels are {labels.min().item()} to {labels.max().item()}, the model has {logits.shape[1]}"
            " outputs: build it with num_classes=, evaluate images with labels"
        )


def shift_accuracies(model: nn.Module, sets: dict[str, EvaluationData]) -> dict[str, float]:
    """Accuracy of a model on every set, by the set's name."""
    return {name: evaluate(model, images).accuracy for name, images in sets.items()}
