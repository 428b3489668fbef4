"""What goes in: the built-in world and its shifts, data sets of the hub and of files, photographs at any
size."""

from atlib.data.images import Images, crop_and_flip, draw, glyph_images, load

__all__ = ["Images", "crop_and_flip", "draw", "glyph_images", "load"]
