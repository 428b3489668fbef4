"""Accuracy of a model on a set of images."""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from atlib._util import in_eval_mode
from atlib.data.sampler import EvaluationData
from atlib.data.torch_data import as_data
from atlib.pair import check_normalisation, student_of
from atlib.train.objectives import outputs

# What to do about logits that say nothing.
NOT_FINITE = "look for NaN in its weights, and in its teacher's where it needs one"
# What to do about a model with fewer outputs than the data have classes.
FEWER = "pass num_classes= when it is built, or evaluate on data with the classes that it was trained for"


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
            f" first of them image {wrong.int().argmax().item()}: {NOT_FINITE}"
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
    images = as_data(images)
    check_normalisation(model, images)
    _check_head(model)
    if len(images) == 0:
        raise ValueError(f"there are no images to evaluate in this {type(images).__name__}")
    like = next(model.parameters())
    starts, world = range(0, len(images), batch_size), dist.get_world_size()
    # right, nats, images, images of which it says nothing, images with a label that the model lacks
    sums = torch.zeros(5, dtype=torch.float64)
    with torch.no_grad(), in_eval_mode(model):
        for place in range(dist.get_rank(), -(-len(starts) // world) * world, world):
            # One that is left without images runs some that it does not count: where weights are divided,
            # all processes are needed.
            start = starts[place % len(starts)]
            mine = range(start, min(start + batch_size, len(images)))
            batch, of_batch = images.take(mine)
            of_batch = of_batch.cpu()
            logits = outputs(model, batch.to(like.device, like.dtype)).logits.double().cpu()
            _check_indices(of_batch)
            known = of_batch.clamp(0, logits.shape[1] - 1)  # the others make all processes raise below
            found = torch.stack(
                [
                    (logits.argmax(1) == of_batch).sum(),
                    nn.functional.cross_entropy(logits, known, reduction="sum"),
                    torch.tensor(len(mine)),
                    says_nothing(logits).sum(),
                    (of_batch != known).sum(),
                ]
            )
            sums += found if place < len(starts) else 0
    sums = sums.to(like.device)
    dist.all_reduce(sums)
    right, nats, count, wrong, unknown = sums.tolist()
    if unknown:
        raise ValueError(
            f"{int(unknown)} of {int(count)} images have no label, or one that the model lacks: {FEWER}"
        )
    if wrong:
        raise ValueError(
            f"the model's logits are NaN or infinite for {int(wrong)} of {int(count)} images: {NOT_FINITE}"
        )
    return Evaluation(right / count, nats / count, int(count))


def _check_head(model: nn.Module) -> None:
    if getattr(student_of(model), "num_classes", None) == 0:
        raise ValueError(
            f"this {type(student_of(model)).__name__} has no class head (num_classes=0), so it says no class"
            " of an image: build it with num_classes=, and train it"
        )


def _check_labels(labels: Tensor, logits: Tensor) -> None:
    _check_indices(labels)
    if labels.min() < 0:
        raise ValueError(
            f"{(labels < 0).sum().item()} of {len(labels)} images have the label {labels.min().item()}, which"
            " is no class: evaluate on images with labels"
        )
    if labels.max() >= logits.shape[1]:
        raise ValueError(
            f"the data have label {labels.max().item()}, the model has only {logits.shape[1]} outputs:"
            f" {FEWER}"
        )


def _check_indices(labels: Tensor) -> None:
    if labels.ndim != 1 or labels.is_floating_point():
        raise ValueError(
            f"labels are {labels.dtype} {tuple(labels.shape)}, and an accuracy needs class indices, int64"
            " (n,): evaluate without what mixes classes"
        )


def shift_accuracies(model: nn.Module, sets: dict[str, EvaluationData]) -> dict[str, float]:
    """Accuracy of a model on every set, by the set's name."""
    return {name: evaluate(model, images).accuracy for name, images in sets.items()}
