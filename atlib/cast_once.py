"""The weights of teachers in half precision, for the whole of a training."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from atlib.pair import Pair


class CastOnce:
    """The weights of a model's teachers in half precision, cast once and not, as by autocast, in every step:
    the same bits. Linear layers and convolutions only; a weight that was changed is cast again. Holds half as
    many bytes as those weights take."""

    KINDS = nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d  # no subclass: it may read a weight in float32

    def __init__(self, model: nn.Module):
        teachers = [one for pair in model.modules() if isinstance(pair, Pair) for one in pair.teachers]
        # `for_teacher` takes the first for the precision of the teacher
        first = [next(teacher.parameters(), None) for teacher in teachers]
        self._places = [
            (layer._parameters, name)
            for layer in dict.fromkeys(layer for teacher in teachers for layer in teacher.modules())
            if type(layer) in self.KINDS
            for name, weight in layer._parameters.items()
            if type(weight) is nn.Parameter and not weight.is_inference()
            if all(weight is not one for one in first)
        ]
        self._kept: list[tuple | None] = [None] * len(self._places)

    @property
    def bytes(self) -> int:
        """That the cast weights take, two each."""
        return sum(2 * weights[name].numel() for weights, name in self._places)

    @contextmanager
    def in_use(self, device: torch.device) -> Iterator[None]:
        """Within it the teachers, on that device, have the weights that autocast would make there."""
        on = torch.is_autocast_enabled(device.type)
        places = self._places if on else []
        weights = [weights[name] for weights, name in places]
        try:
            for number, ((of_layer, name), weight) in enumerate(zip(places, weights)):
                if weight.dtype == torch.float32:
                    of_layer[name] = self._cast(number, weight, torch.get_autocast_dtype(device.type))
            yield
        finally:
            for (of_layer, name), weight in zip(places, weights):
                of_layer[name] = weight

    def _cast(self, number: int, weight: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
        state = dtype, weight.data_ptr(), weight._version
        kept = self._kept[number]
        if kept is None or kept[0] is not weight or kept[1] != state:
            cast = nn.Parameter(weight.detach().to(dtype), requires_grad=False)
            self._kept[number] = kept = (weight, state, cast)
        return kept[2]
