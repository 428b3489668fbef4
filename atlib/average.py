"""The running average of a model's weights (EMA), which many recipes evaluate in place of the last weights."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from atlib.sharding import divide


class Average:
    """average ← decay · average + (1 - decay) · weights after every step, starting from the first weights.

    It holds one tensor for each parameter of `model`, where and as the parameter is (a shard of it, where the model is sharded).
    Source: Polyak and Juditsky 1992; with decay 0.9999 in the recipes of DeiT (arXiv 2012.12877) and of the paper (arXiv 2411.09702).
    """

    def __init__(self, model: nn.Module, decay: float):
        self.decay = decay
        self.values = [parameter.detach().clone() for parameter in model.parameters()]

    def update(self, model: nn.Module) -> None:
        """Take in the weights as they are now."""
        with torch.no_grad():
            torch._foreach_lerp_(self.values, list(model.parameters()), 1 - self.decay)

    @contextmanager
    def in_place_of(self, model: nn.Module) -> Iterator[None]:
        """Within the block `model` has the averaged weights; afterwards its own again, bit for bit."""
        self._swap(model)
        try:
            yield
        finally:
            self._swap(model)

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint keeps; of a sharded model this process's shards."""
        return {f"average.{index}": _local(value) for index, value in enumerate(self.values)}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back what `tensors` returned."""
        for index, value in enumerate(self.values):
            _local(value).copy_(tensors[f"average.{index}"])

    def _swap(self, model: nn.Module) -> None:
        divide(model)
        with torch.no_grad():
            for value, parameter in zip(self.values, model.parameters(), strict=True):
                own = parameter.detach().clone()
                parameter.copy_(value)
                value.copy_(own)


def _local(value: Tensor) -> Tensor:
    return value.to_local() if hasattr(value, "to_local") else value
