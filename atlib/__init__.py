"""Attention transfer between Vision Transformers: copy a teacher's attention maps, or distill them."""

from atlib.plan import Plan
from atlib.student import create_student
from atlib.transfer import AttentionTransfer
from atlib.vit import create_vit
from atlib.walking import walk

__version__ = "0.1.0"
__all__ = ["AttentionTransfer", "Plan", "create_student", "create_vit", "walk"]
