"""How a model of some library is walked: one adapter for each kind of ViT, and yours."""

from atlib.adapters.adapter import Adapter, Sizes, Unwalkable
from atlib.adapters.choose import adapter_of
from atlib.attention import Layer

__all__ = ["Adapter", "Layer", "Sizes", "Unwalkable", "adapter_of"]
