"""What goes in: images in memory, torch data sets, and a teacher's stored maps."""

from atlib.data.images import UNLABELLED, Images, crop_and_flip, draw, pair, with_unlabelled
from atlib.data.map_cache import MapCache

__all__ = ["UNLABELLED", "Images", "MapCache", "crop_and_flip", "draw", "pair", "with_unlabelled"]
