"""How splits are called, and which images are held out where a data set publishes no split for it."""

import numpy as np

# What a split's folder of images may be called, in small or capital letters.
SPLIT_NAMES = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
VALIDATION_SHARE = 0.1  # of "train", where a data set publishes no validation split


def fixed_order(count: int) -> np.ndarray:
    """The order in which images are held out: always the same, so that it never depends on a run's seed."""
    return np.random.default_rng(0).permutation(count)
