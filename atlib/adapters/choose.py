"""Which adapter a model has, by the library that its class comes from."""

from pathlib import Path

from timm.models.beit import Beit
from timm.models.eva import Eva
from timm.models.naflexvit import NaFlexVit
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer_relpos import VisionTransformerRelPos
from torch import nn

from atlib.adapters import timm
from atlib.adapters.adapter import Adapter, Unwalkable

HOW_TO_ADD_ONE = (
    "If its layers have maps, softmax(scale · q kᵀ + bias), write an atlib.adapters.Adapter for it, as"
    " examples/own_vit.py does in some 25 lines, and hand that over in place of the model"
)


def adapter_of(model: nn.Module | Adapter) -> Adapter:
    """How a model is walked; an adapter is its own. Raises `Unwalkable`, with the way out, for a class that
    no adapter knows."""
    if isinstance(model, Adapter):
        return model
    if (named := getattr(type(model), "walked_by", None)) is not None:
        return named(model)
    for family, adapter in TIMM:
        if isinstance(model, family):
            return adapter(model)
    # Not every environment has these libraries: code that passes a model of one has imported it already.
    library = _library(model)
    if library == "transformers":
        from atlib.adapters.hugging_face import adapter_for

        return adapter_for(model)
    if library == "torchvision":
        from atlib.adapters.torchvision import adapter_for

        return adapter_for(model)
    if library == "open_clip":
        from atlib.adapters.open_clip import adapter_for

        return adapter_for(model)
    name = type(model).__name__
    if isinstance(model, (str, Path)):
        raise Unwalkable(f"cannot walk {str(model)!r}, a name: read the model first, load_teacher(...).vit")
    if isinstance(getattr(model, "vit", None), nn.Module):
        raise Unwalkable(f"cannot walk a {name}, which has a ViT: pass its .vit")
    reason = timm.why_not(model, f"no adapter knows this class of {type(model).__module__}. {HOW_TO_ADD_ONE}")
    raise Unwalkable(f"cannot walk a {name}: {reason}")


TIMM = (
    (VisionTransformer, timm.ViT),
    (Eva, timm.EvaViT),
    (Beit, timm.BeitViT),
    (VisionTransformerRelPos, timm.RelativeViT),
    (NaFlexVit, timm.NaFlex),
)


def _library(model: nn.Module) -> str:
    """The library among those with adapters that a model's class, or one that it is derived from, comes
    from; "" for none."""
    roots = (kind.__module__.partition(".")[0] for kind in type(model).__mro__)
    return next((root for root in roots if root in ("transformers", "torchvision", "open_clip")), "")
