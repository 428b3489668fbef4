"""What a teacher may look at in place of a photograph, whose scene cannot be drawn again."""

import numpy as np

from atlib.data import Images


def other_of_class(images: Images, same: bool, seed: int) -> Images:
    """For each image another one of `images`, drawn by `seed`, of the same class or of a different one, for
    `atlib.data.pair`. Labels are those of the images drawn.

    Raises `ValueError` for a class with a single image, or images of a single class.
    """
    classes, rng = np.asarray(images.targets), np.random.default_rng(seed)
    chosen = np.empty(len(classes), dtype=np.int64)
    for label in np.unique(classes):
        ids = np.flatnonzero(classes == label)
        others = np.flatnonzero(classes != label)
        if len(ids if same else others) < 1 + same:
            raise ValueError(
                f"class {label} has {len(ids)} of {len(classes)} images: there is no other image of"
                f" {'the same' if same else 'another'} class"
            )
        # the same class: on by 1 to n - 1 places, so never the image itself
        step = rng.integers(1, len(ids), len(ids)) if same else None
        chosen[ids] = ids[(np.arange(len(ids)) + step) % len(ids)] if same else rng.choice(others, len(ids))
    return images.select(chosen.tolist())
