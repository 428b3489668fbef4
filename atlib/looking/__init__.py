"""Where every token of a ViT looks on one picture: a page that a reader clicks through, without a kernel."""

from atlib.looking.page import Look, look
from atlib.looking.preparation import Preparation

__all__ = ["Look", "Preparation", "look"]
