"""Where every token of a ViT looks on one picture: a page that a reader clicks through, without a kernel."""

from atrun.looking.page import Look, look
from atrun.looking.preparation import Preparation

__all__ = ["Look", "Preparation", "look"]
