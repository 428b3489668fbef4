"""What `walk` asks of a model: how it embeds images, what its layers are, and what it makes of the tokens."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from atlib.attention import Layer
from atlib.timm_config import Settings
from atlib.watching import Unwalkable


class _OldUnwalkable(TypeError):
    """`walk` would not compute what this model computes; the message names the part and the reason."""


class Sizes(NamedTuple):
    """What must fit between two ViTs."""

    depth: int
    heads: int
    head_width: int
    #: Patches down and across.
    grid: tuple[int, int]
    #: Pixels down and across.
    image: tuple[int, int]
    #: How many class tokens, distillation tokens, registers stand before the patches, in this order.
    prefix_kinds: tuple[int, int, int]

    @property
    def prefix(self) -> int:
        """All prefix tokens."""
        return sum(self.prefix_kinds)


class Adapter(ABC):
    """One model as `walk` sees it. For a class of your own, write a subclass and hand it over in place of the
    model: `walk(MyAdapter(model), images)`, `AttentionTransfer(MyAdapter(teacher), student, plan)`.

    A class that names its adapter, as `walked_by = MyAdapter`, is walked as it is.

    `embed`, `head` and `sizes` must be written, with a `Layer` for the blocks; `examples/own_vit.py` does it
    in some 25 lines. An adapter keeps no state but its `model`: it is made anew as often as one likes.
    `atlib.walking.check_exact` compares what it computes with the model's own output.
    """

    #: Where the container of the blocks is in the model: an `nn.ModuleList` or `nn.Sequential`, by its name.
    blocks_at = "blocks"
    #: Whether a layer forbids pairs of tokens (`Layer.mask`).
    masked = False
    #: Whether a step's inside is computed again in the backward pass instead of being kept.
    checkpointing = False
    #: Whether `check` alone shows that the walk is exact, as it does for classes of a library. What it cannot
    #: show, a pair compares on a batch once, when it is built.
    exact_by_class = False

    def __init__(self, model: nn.Module):
        self.model = model

    @abstractmethod
    def embed(self, images: Tensor) -> tuple[Tensor, Sequence[Layer]]:
        """The residual stream before the first block, (B, N, D), prefix tokens first and patches row by row;
        and the layers that it goes through."""

    @abstractmethod
    def head(self, tokens: Tensor) -> Tensor:
        """What the model makes of the residual stream after the last block: logits (B, classes), or what a
        model without classes returns."""

    @abstractmethod
    def sizes(self) -> Sizes:
        """What must fit between two ViTs."""

    def output(self, images: Tensor) -> Tensor:
        """The model's own output for the images, by its own forward: what `head` must be equal to."""
        return self.model(images)

    def check(self) -> None:  # noqa: B027 (most adapters have nothing to refuse)
        """Raise `Unwalkable` where the model, or the mode that it is in, is one that this adapter does not
        know."""

    def still_walkable(self) -> bool:
        """Whether a model that was checked is still in a mode and of blocks that can be walked: a quick look
        at every walk."""
        return True

    def settings(self, layer_scale_init: float | None = None) -> Settings:
        """The settings of the timm ViT with this model's components, for `create_student` and for `describe`.

        `layer_scale_init`: where layer scale starts, None for what the model says. Raises `ValueError` where
        there is no such ViT.
        """
        kind = type(self.model).__name__
        raise ValueError(
            f"the components of a {kind} are not known: build the student yourself, such as a second {kind},"
            f" and say Plan(mismatched=True); or write {type(self).__name__}.settings"
        )

    def drop_paths(self) -> Sequence[tuple[Any, Any]]:
        """For every layer the modules that drop the attention and the MLP branch: None where there is
        none."""
        return [(None, None)] * len(self.blocks)

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """The blocks, in their order."""
        return self.model.get_submodule(self.blocks_at)

    def of_first_blocks(self, number: int) -> "Adapter":
        """An adapter of the model without its blocks after the first `number`; both models share everything
        else, and this one stays as it is."""
        if number == len(self.blocks):
            return self
        part = copy.copy(self)
        part.model = _with_first(self.model, self.blocks_at.split("."), number)
        return part


def _with_first(module: nn.Module, path: Sequence[str], number: int) -> nn.Module:
    """The module with the first `number` items of the container at `path`; all else is shared."""
    if not path:
        return module[:number]
    part = copy.copy(module)
    part._modules = {**module._modules, path[0]: _with_first(module._modules[path[0]], path[1:], number)}
    return part
