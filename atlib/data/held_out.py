"""Which images are held out where a data set publishes no split for it: always the same."""

import numpy as np

VALIDATION_SHARE = 0.1  # of "train", where a data set publishes no validation split


def fixed_order(count: int) -> np.ndarray:
    """The order in which images are held out: always the same, so that it never depends on a run's seed."""
    return np.random.default_rng(0).permutation(count)
