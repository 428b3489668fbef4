"""What goes in: data sets of the hub and of files, photographs at any size, and data that a function
makes."""

from atlib.data.images import UNLABELLED, Images, crop_and_flip, draw, load, pair, with_unlabelled
from atlib.data.map_cache import MapCache
from atlib.data.photos import Photos, open_photos
from atlib.data.stream import PhotoStream, open_stream
from atlib.data.transforms import Augmentation

__all__ = [
    "UNLABELLED",
    "Augmentation",
    "Images",
    "MapCache",
    "PhotoStream",
    "Photos",
    "crop_and_flip",
    "draw",
    "load",
    "open_photos",
    "open_stream",
    "pair",
    "with_unlabelled",
]
