"""Accuracy of a model on a set of images."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from atlib.data import Images
from atlib.train import outputs


class Evaluation(NamedTuple):
    """accuracy: share of images whose largest logit is the label's; loss: mean cross-entropy in nats; count: images."""

    accuracy: float
    loss: float
    count: int


def predict(model: nn.Module, images: Images, batch_size: int = 500) -> Tensor:
    """Logits (n, classes) of all images in order, on the CPU. The model runs in eval mode and is left in the mode it was in."""
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            parts = [outputs(model, batch.to(device)).logits.float().cpu() for batch, _ in images.loader(batch_size)]
    finally:
        model.train(training)
    return torch.cat(parts)


def evaluate(model: nn.Module, images: Images, batch_size: int = 500) -> Evaluation:
    """Accuracy and loss of `model` on `images`.

    Raises `ValueError` when the model has fewer outputs than there are classes, and for logits that are NaN.
    """
    logits, labels = predict(model, images, batch_size), images.targets
    if labels.max() >= logits.shape[1]:
        raise ValueError(f"the data have label {labels.max().item()}, the model has only {logits.shape[1]} outputs: pass num_classes=")
    nan = logits.isnan().any(1)
    if nan.any():  # their argmax would count as a prediction
        raise ValueError(f"the model's logits are NaN for {nan.sum().item()} of {len(nan)} images, the first of them image {nan.int().argmax().item()}: "
                         "look for NaN in its weights, and in its teacher's where it needs one")
    return Evaluation((logits.argmax(1) == labels).double().mean().item(),
                      nn.functional.cross_entropy(logits, labels).item(), len(labels))
