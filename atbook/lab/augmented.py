"""The study of augmentation: is part of what Copy gains regularisation, and do maps and augmentation add
up?"""

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from PIL import Image
from timm.data.auto_augment import AugmentOp, rand_augment_transform
from torch import nn

from atbook.lab.as_pictures import as_pictures
from atbook.lab.scales import AXES, START, GlyphScale
from atbook.lab.study import Sources, Variant, by, scratch, study
from atbook.lab.tuning import Range
from atlib.data import Images

Operation = Callable[[Image.Image], Image.Image]

# --- Published augmentations, without what changes the label of Find, which is the shape in the cell with
# light dots in its corners. A test holds that the rest leaves the mark where it is. ---

# The third of 3-Augment (arXiv 2204.07118), solarising, turns what is light dark: the mark is gone. The blur
# is half as wide as the published one, at most a pixel: a dot of the mark is a pixel, and these images have a
# seventh of ImageNet's.
THREE = (("Desaturate", 10), ("GaussianBlurRand", 5))
# RandAugment's operations (arXiv 1909.13719) but for these: inverting and solarising, for the same reason;
# posterising, which at the end of its range leaves a black image; rotating, shearing and moving, which take
# cells out of their patches, and the marked one out of the image.
RANDOM = (
    "AutoContrast",
    "Equalize",
    "SolarizeAdd",
    "ColorIncreasing",
    "ContrastIncreasing",
    "BrightnessIncreasing",
    "SharpnessIncreasing",
)
# DeiT's (arXiv 2012.12877).
STRENGTH, MIXUP = "rand-m9-mstd0.5-inc1", 0.8
# AugReg's regularisation: dropout and stochastic depth, both of one tenth.
DROPPED = {"drop_rate": 0.1, "drop_path_rate": 0.1}


def three_augment(parts: Sequence[tuple[str, int]] = THREE) -> Operation:
    """One of the operations of 3-Augment, with equal chance; parts: of which."""
    operations = [AugmentOp(name, prob=1.0, magnitude=magnitude) for name, magnitude in parts]
    return lambda picture: random.choice(operations)(picture)


def rand_augment() -> Operation:
    """RandAugment: two of its operations, each with a chance of one half."""
    return rand_augment_transform(STRENGTH, transforms=list(RANDOM))


def _changed(make: Callable[[], Operation], scale: GlyphScale, seed: int) -> Images:
    """The students' training images; a teacher sees what its student sees."""
    return scale.labelled(seed).with_augment(as_pictures(make()))


# --- The study: every variant has the search that scratch and copy have in the central experiment, which they
# are compared with ---


def _variant(
    name: str,
    build: Callable[[Sources], nn.Module],
    make: Callable[[], Operation] | None = None,
    changes: Mapping = {},
    student: Mapping = {},
) -> Variant:
    images = make and partial(_changed, make)
    return Variant(name, build, None, changes, Range(AXES, START, {}), student, images=images)


AUGMENTATION = study(
    "augmentation",
    _variant("scratch, 3-augment", scratch, three_augment),
    _variant("scratch, randaugment", scratch, rand_augment),
    _variant("scratch, mixup", scratch, changes={"mixup": MIXUP}),
    _variant("copy, 3-augment", by(), three_augment),
    # 3-Augment's parts alone, and AugReg's (arXiv 2106.10270) two helps, each with and without the other
    _variant("scratch, grey", scratch, partial(three_augment, THREE[:1])),
    _variant("scratch, blur", scratch, partial(three_augment, THREE[1:])),
    _variant("scratch, dropout", scratch, student=DROPPED),
    _variant("scratch, randaugment and dropout", scratch, rand_augment, student=DROPPED),
)
