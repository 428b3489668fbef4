"""Real data: data sets of the hub and of files, photographs at any size, and data that a function makes."""

from atrun.data.photos import Photos, load, open_photos
from atrun.data.stream import PhotoStream, open_stream
from atrun.data.transforms import Augmentation

__all__ = ["Augmentation", "PhotoStream", "Photos", "load", "open_photos", "open_stream"]
