"""Attention transfer between Vision Transformers: copy a teacher's attention maps, or distill them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

# ruff: noqa: F401 - `__all__` is what `_HOME` has
if TYPE_CHECKING:
    from atfamily.map_cache import MapCache
    from atlib.attention import Instead, Seen, Unwalkable, Walk, walk
    from atlib.attention_transfer import AttentionTransfer
    from atlib.losses import attention_cross_entropy
    from atlib.pair import Normalisation
    from atlib.plan import Plan
    from atlib.recipe import Recipe
    from atlib.student import create_student
    from atlib.vit import create_vit
    from atrun.looking.page import look
    from atrun.one_call import transfer
    from atrun.teachers.load import load_teacher

__version__ = "0.1.0"
# Imported when it is asked for: `python -m atlib --help` does without torch, and Copy without Accelerate.
# `train` is not here: by what was imported before, it would be the function or the file.
_HOME = {
    "AttentionTransfer": "atlib.attention_transfer",
    "Plan": "atlib.plan",
    "create_student": "atlib.student",
    "create_vit": "atlib.vit",
    "walk": "atlib.attention",
    "Walk": "atlib.attention",
    "Seen": "atlib.attention",
    "Instead": "atlib.attention",
    "Unwalkable": "atlib.attention",
    "attention_cross_entropy": "atlib.losses",
    "MapCache": "atfamily.map_cache",
    "Normalisation": "atlib.pair",
    "load_teacher": "atrun.teachers.load",
    "look": "atrun.looking.page",
    "transfer": "atrun.one_call",
    "Recipe": "atlib.recipe",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'atlib' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
