"""Accuracy of a model on a set of images."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from atlib._util import in_eval_mode
from atlib.data import as_data
from atlib.loading import EvaluationData, in_order
from atlib.objectives import check_labels, outputs
from atlib.pair import check_normalisation, student_of, unwrapped


class Evaluation(NamedTuple):
    """Of how many images the largest logit is the label's, and the loss."""

    accuracy: float  #: Share of the images.
    loss: float  #: Mean cross-entropy in nats.
    count: int


Labelled = EvaluationData | Dataset | DataLoader


def predict(model: nn.Module, images: Labelled, batch_size: int = 500) -> Tensor:
    """Logits (n, classes) of all images in order, on the CPU; the model runs in eval mode."""
    images = as_data(images)
    return _predicted(model, images, images.loader(batch_size))[0]


def evaluate(model: nn.Module, images: Labelled, batch_size: int = 500) -> Evaluation:
    """Accuracy and loss of `model` on `images`, which `atlib.data.as_data` takes."""
    if getattr(student_of(unwrapped(model)), "num_classes", None) == 0:
        raise ValueError("the model has no class head (num_classes=0): build it with num_classes=")
    images = as_data(images)
    return score(*_predicted(model, images, images.loader(batch_size)))


def evaluate_together(model: nn.Module, images: Labelled, batch_size: int = 500) -> Evaluation:
    """`evaluate`, with the images divided among the processes, each of which must call it."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return evaluate(model, images, batch_size)
    images, parts, world = as_data(images), [], dist.get_world_size()
    batches = in_order(len(images), batch_size)
    for place in range(dist.get_rank(), -(-len(batches) // world) * world, world):
        # One that is left without images runs some that it does not count: where weights are divided, all
        # processes are needed.
        predicted = _predicted(model, images, [images.take(batches[place % len(batches)])])
        if place < len(batches):
            parts.append((place, *predicted))
    _, logits, labels = zip(*sorted(gather_object(parts), key=lambda part: part[0]))
    return score(torch.cat(logits), torch.cat(labels))


def _predicted(model: nn.Module, images: EvaluationData, batches: Iterable) -> tuple[Tensor, Tensor]:
    """Logits (n, classes) and labels (n,) of batches of the images."""
    check_normalisation(model, images)
    like = next(model.parameters())
    logits, labels = [], []
    with torch.no_grad(), in_eval_mode(model):
        for batch, of_batch in batches:
            logits.append(outputs(model, batch.to(like.device, like.dtype)).logits.float().cpu())
            labels.append(of_batch.cpu())
    if not logits:
        raise ValueError("no images to evaluate")
    return torch.cat(logits), torch.cat(labels)


def score(logits: Tensor, labels: Tensor) -> Evaluation:
    """Accuracy and loss of logits (n, classes), as `predict` gives them, against labels (n,)."""
    check_labels(labels, logits.shape[1])
    if labels.ndim != 1:
        raise ValueError(f"labels are class indices (n,), got {tuple(labels.shape)}")
    if labels.min() < 0:
        raise ValueError(f"{(labels < 0).sum().item()} of {len(labels)} images have no label")
    wrong = says_nothing(logits)
    if wrong.any():  # their argmax would count as a prediction
        raise ValueError(f"the model's logits of image {wrong.int().argmax().item()} are NaN or infinite")
    accuracy = (logits.argmax(1) == labels).double().mean().item()
    return Evaluation(accuracy, nn.functional.cross_entropy(logits, labels).item(), len(labels))


def says_nothing(logits: Tensor) -> Tensor:
    """Which rows of logits (n, classes) have no probabilities, bool (n,)."""
    return ~logits.logsumexp(1).isfinite()  # minus infinity rules a class out, and may stand there
