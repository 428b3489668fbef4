"""Data sets by name: where they are, and what was published about them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from atlib._util import require_known

# What a split's folder of images may be called, in small or capital letters.
SPLIT_NAMES = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
VALIDATION_SHARE = 0.1  # of "train", where a data set publishes no validation split


class Entry(NamedTuple):
    """A data set that has a name here. hub: its id there, None where no complete copy was found. classes:
    their number. images: how many each split has. evaluated: the split on which results are reported.
    otherwise: what to do without a copy on the hub. files: the pattern of each split's files there."""

    hub: str | None
    classes: int
    images: Mapping[str, int]
    evaluated: str
    otherwise: str = ""
    files: Mapping[str, str] = {}

    def images_in(self, split: str) -> int | None:
        """How many images a split, or several as "train+validation", has; None for splits of its own."""
        parts = split.split("+")
        return sum(map(self.images.get, parts)) if set(parts) <= set(self.images) else None


def find(name_or_path: str | Path, path: str | Path | None = None) -> tuple[str, Path | None, Entry | None]:
    """Of a name of `CATALOGUE` (its files in `path`, if given), a file or folder, or a hub id "owner/name":
    the name for messages, or the hub's id where the path is None, the path, and what is published."""
    name = str(name_or_path)
    entry, here = CATALOGUE.get(name), Path(path or name).expanduser()
    if path is not None:
        if not here.exists():
            raise FileNotFoundError(f"{path} does not exist: --data_path FOLDER has the files of {name}")
        return name, here, entry
    if entry is not None:
        if entry.hub is None:
            raise ValueError(f"{name} is not whole on the hub: {entry.otherwise}; --data_path FOLDER")
        return entry.hub, None, entry
    if here.exists():
        return name, here, None
    if isinstance(name_or_path, Path) or name[:1] in ("/", ".", "~") or here.suffix in (".parquet", ".arrow"):
        raise FileNotFoundError(f"{name} does not exist")
    if name.count("/") != 1:  # all that is left is a hub id, "owner/name"
        require_known("data set (there is no file or folder of that name)", name, CATALOGUE)
    return name, None, None


def fixed_order(count: int) -> np.ndarray:
    """The order in which images are held out: always the same, so that it never depends on a run's seed."""
    return np.random.default_rng(0).permutation(count)


def draw(count: int, size: int | None, seed: int, what: str) -> Sequence[int]:
    """Which `size` of `count` images: a random choice by `seed`, or all in order (None)."""
    wanted = count if size is None else size
    if not 1 <= wanted <= count:
        raise ValueError(f"{what} has {count} images, {wanted} were asked for")
    if size is None:
        return range(count)
    return np.random.default_rng([seed, 1]).permutation(count)[:size]


def _published(train: int, validation: int = 0, test: int = 0) -> dict[str, int]:
    """Images per split. Where no validation images are published, a tenth of the training images is held
    out; beside a test split, both together are training data."""
    held_out = validation or round(VALIDATION_SHARE * train)
    rest, both = (train, train + validation) if validation else (train - held_out, train)
    sizes = {"train": rest, "validation": held_out, "train+validation": both, "test": test}
    return {split: count for split, count in sizes.items() if count}


INATURALIST = "https://github.com/visipedia/inat_comp"
AIRCRAFT = "https://www.robots.ox.ac.uk/~vgg/data/fgvc-aircraft/"
IMAGENET = "https://www.image-net.org/download.php"
_UNPACK = f"fetch images and annotations from {INATURALIST}, unpack them into one folder"

# Sources: the papers, by their arXiv number or title, and the pages that they name.
CATALOGUE: dict[str, Entry] = {
    # Russakovsky et al. 2015 (1409.0575), Table 2. Its published test split has no labels, so there is none
    # here. The hub gives the images after a login.
    "imagenet-1k": Entry(
        "ILSVRC/imagenet-1k",
        1000,
        {"train": 1_281_167, "validation": 50_000},
        "validation",
        files={"train": "data/train-*.parquet", "validation": "data/validation-*.parquet"},
    ),
    # The release of fall 2011, which papers mean (1409.0575, state of August 2014; that of winter 2021 has
    # 19,167 classes). It has no splits, so a paper that trains on all of it trains on "train+validation". The
    # hub's copies have other columns, or some of the classes.
    "imagenet-21k": Entry(
        None,
        21_841,
        _published(14_197_122),
        "validation",
        f"fetch it from {IMAGENET} (after a login), unpack it into FOLDER/train/WORDNET_ID",
    ),
    # Krizhevsky 2009, Learning Multiple Layers of Features from Tiny Images
    "cifar10": Entry("uoft-cs/cifar10", 10, _published(50_000, test=10_000), "test"),
    "cifar100": Entry("uoft-cs/cifar100", 100, _published(50_000, test=10_000), "test"),
    # Van Horn et al. 2018 (1707.06642) and the Details of each year's page. The hub was found to have parts
    # only; the authors' archives hold images and annotations, train2018.json and val2018.json.
    "inat2017": Entry(None, 5089, {"train": 579_184, "validation": 95_986}, "validation", _UNPACK),
    "inat2018": Entry(None, 8142, {"train": 437_513, "validation": 24_426}, "validation", _UNPACK),
    # The authors give the sum of both, 268,243; 265,213 is what the challenge's copies count.
    "inat2019": Entry(None, 1010, {"train": 265_213, "validation": 3_030}, "validation", _UNPACK),
    # The small sets of transfer learning: papers train on "train+validation" and report the test split.
    # Nilsback and Zisserman 2008; Parkhi et al. 2012; Krause et al. 2013
    "flowers102": Entry("dpdl-benchmark/oxford_flowers102", 102, _published(1_020, 1_020, 6_149), "test"),
    "pets": Entry("timm/oxford-iiit-pet", 37, _published(3_680, test=3_669), "test"),
    # Maji et al. 2013 (1306.5151). Its classes are the 100 variants. The hub's copies need code of their own
    # to be read, or have other classes.
    "aircraft": Entry(
        None,
        100,
        _published(3_334, 3_333, 3_333),
        "test",
        f"fetch it from {AIRCRAFT}, lay its images into FOLDER/train/VARIANT, FOLDER/validation/VARIANT and"
        " FOLDER/test/VARIANT, as its images_variant_*.txt list them (a slash in a name as a dash)",
    ),
    "cars": Entry("tanganke/stanford_cars", 196, _published(8_144, test=8_041), "test"),
    # Bossard et al. 2014. The hub calls its test images "validation".
    "food101": Entry("ethz/food101", 101, {"train": 75_750, "validation": 25_250}, "validation"),
}
