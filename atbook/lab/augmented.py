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
from atbook.lab.study import Sources, Study, Variant, by, scratch
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
    method: str,
    build: Callable[[Sources], nn.Module],
    augmentation: str,
    make: Callable[[], Operation] | None = None,
    changes: Mapping = {},
    student: Mapping = {},
) -> Variant:
    return Variant(
        "{method}, {augmentation}",
        build,
        None,
        changes,
        Range(AXES, START, {}),
        student=student,
        images=make and partial(_changed, make),
        differs={"method": method, "augmentation": augmentation},
    )


AUGMENTATION = Study(
    "augmentation",
    "scratch with 3-Augment or one of its parts, RandAugment, mixup, dropout or two of them, and copy with"
    " 3-Augment; without augmentation both are in"
    " the central experiment, where every method has the same search: is part of Copy's gain regularisation,"
    " and do maps and augmentation add up?",
    "not in the paper, which augments all of its students alike",
    (
        _variant("scratch", scratch, "3-augment", three_augment),
        _variant("scratch", scratch, "randaugment", rand_augment),
        _variant("scratch", scratch, "mixup", changes={"mixup": MIXUP}),
        _variant("copy", by(), "3-augment", three_augment),
        # 3-Augment's parts alone, and AugReg's (arXiv 2106.10270) two helps, each with and without the other
        _variant("scratch", scratch, "grey", partial(three_augment, THREE[:1])),
        _variant("scratch", scratch, "blur", partial(three_augment, THREE[1:])),
        _variant("scratch", scratch, "dropout", student=DROPPED),
        _variant("scratch", scratch, "randaugment and dropout", rand_augment, student=DROPPED),
    ),
    only=("find",),
)
