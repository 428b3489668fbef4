"""Data sets by name: where they are, what was published about them, and how their rows are opened.

What is written here can be read without a network, so that a run can be planned before anything is
downloaded. None of the large sets was downloaded here; CIFAR-10 and PACS were read from the copies in the
workshop's shared/.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from atlib._util import require_known
from atlib.data import Images, draw
from atrun.data.decoding import DataError, MissingData
from atrun.data.in_memory import HUB, decode_rows
from atrun.data.splits import SPLIT_NAMES, VALIDATION_SHARE, fixed_order

# --- PACS: the same seven classes as photographs, art paintings, cartoons and sketches ---

PACS = "flwrlabs/pacs"
DOMAINS = ("photo", "art_painting", "cartoon", "sketch")
SPLITS = ("train", "validation", "test", "all")
TEST_SHARE = 0.2  # of every domain, beside `VALIDATION_SHARE`


def load_pacs(
    domains: Sequence[str],
    path: str | Path | None = None,
    *,
    split: str = "train",
    size: int | None = None,
    seed: int = 0,
    image_size: int | None = None,
) -> Images:
    """Load a split of some domains of PACS; classes are indices into `Images.classes`, the same in every
    domain.

    domains: some of `DOMAINS`. path: a parquet file or a folder of them in the hub's format (None: from the
    hub). split: "train", "validation", "test" or "all". The hub's copy has no splits, so they are this book's
    own and not the published ones: a fixed tenth of every domain for validation, a fifth for test, by
    position in the file, hanging on no seed. size, seed, image_size: as in `atrun.data.in_memory.load`.

    Raises `ValueError` for unknown domains and splits and for missing columns, and what `load` raises for
    files and the network. Source: Li et al. 2017, "Deeper, Broader and Artier Domain Generalization" (arXiv
    1710.03077).
    """
    from atrun.data.hub import class_names, columns_of  # imported here: `datasets` takes seconds

    rows = pacs_rows(domains, path, split)
    image_column, label_column = columns_of(rows)
    rows = rows.select(draw(len(rows), size, seed, f"PACS {', '.join(domains)} {split}"))
    return Images(
        decode_rows(rows, image_column, image_size),
        torch.tensor(rows[label_column][:]),
        class_names(rows, label_column),
    )


def pacs_rows(domains: Sequence[str], path: str | Path | None, split: str):
    """The rows of a split of some domains, undecoded, as a `datasets.Dataset`; see `load_pacs`."""
    if isinstance(domains, str) or len(domains) == 0:
        raise ValueError(f"domains must be a list with at least one of {', '.join(DOMAINS)}, got {domains!r}")
    for domain in domains:
        require_known("domain of PACS", domain, DOMAINS)
    require_known("split of PACS", split, SPLITS)
    from atrun.data.hub import find_column, open_rows

    rows = open_rows(PACS, path, "train")
    domain_of = np.array(rows[find_column(rows, ("domain",), "domain")][:])
    missing = ", ".join(domain for domain in domains if domain not in domain_of)
    if missing:
        raise ValueError(f"the data have no image of {missing}, only of {', '.join(sorted(set(domain_of)))}")
    # A set, in the file's order: naming a domain twice, or in another order, changes nothing.
    parts = [_split(np.flatnonzero(domain_of == domain), split) for domain in set(domains)]
    return rows.select(np.sort(np.concatenate(parts)))


def _split(positions: np.ndarray, split: str) -> np.ndarray:
    """The part of one domain's positions that a split is."""
    if split == "all":
        return positions
    shuffled = positions[fixed_order(len(positions))]
    validation, test = round(VALIDATION_SHARE * len(shuffled)), round(TEST_SHARE * len(shuffled))
    parts = dict(zip(("validation", "test", "train"), np.split(shuffled, [validation, validation + test])))
    return parts[split]


class Known(NamedTuple):
    """A data set that has a name here. hub: its id there, None where no complete copy was found. classes:
    their number. images: how many each split has, in the splits that `open_rows_of` opens. evaluated: the
    split on which results are reported. source: where this is said.

    otherwise: where there is no copy on the hub, what to do instead, before the folder is passed as path=.
    columns: image and label, where they are not called as usual. files: on the hub, the pattern of each
    split's files, so that one can be fetched without the others. domains: those of PACS that it is.
    """

    hub: str | None
    classes: int
    images: Mapping[str, int]
    evaluated: str
    source: str
    otherwise: str = ""
    columns: tuple[str | None, str | None] = (None, None)
    files: Mapping[str, str] = {}
    domains: tuple[str, ...] = ()


class Opened(NamedTuple):
    """Rows, image and label column (None: read without labels) of a split; `known`: what is published about
    it, None without a name."""

    rows: Any  # a datasets.Dataset
    image_column: str
    label_column: str | None
    known: Known | None


class Location(NamedTuple):
    """Where data are. name: for messages, and the hub's id where `path` is None; "imagefolder" for one folder
    per class, whose columns are then called as usual, whatever they are called on the hub."""

    name: str
    path: Path | None
    known: Known | None

    def columns(self, image: str | None, label: str | None) -> tuple[str | None, str | None]:
        """The image and the label column: those named, else those that the known set calls otherwise than
        usual (None: as usual)."""
        published = self.known is not None and self.name != "imagefolder"
        usual = self.known.columns if published else (None, None)
        return image or usual[0], label or usual[1]


def find(name_or_path: str | Path, path: str | Path | None = None) -> Location:
    """Tell a name of `CATALOGUE` (its files in `path`, if given), a file or folder, and a hub id "owner/name"
    from each other.

    Nothing is opened. Raises `ValueError` for a name that is none of these, `FileNotFoundError` for a path
    that is not there.
    """
    name = str(name_or_path)
    if path is not None and not Path(path).exists():
        raise MissingData(f"{path} does not exist: it is where the files of {name} are looked for", "path")
    if name in CATALOGUE:
        known = CATALOGUE[name]
        if path is None and known.hub is None:
            raise DataError(
                f"no complete copy of {name} was found on the hub: {known.otherwise}, and pass it as path=",
                "path",
            )
        if path is None:
            return Location(known.hub, None, known)
        folders = _has_class_folders(Path(path)) and not known.domains
        return Location("imagefolder" if folders else name, Path(path), known)
    here = Path(path if path is not None else name_or_path).expanduser()
    if path is not None or here.exists():
        from atrun.data.hub import is_image_folder  # imported here: `datasets` takes seconds

        return Location("imagefolder" if is_image_folder(here) else name, here, None)
    if isinstance(name_or_path, Path) or name[:1] in ("/", ".", "~") or here.suffix in (".parquet", ".arrow"):
        raise FileNotFoundError(f"{name} does not exist")
    if name.count("/") != 1:  # all that is left is a hub id, "owner/name"
        require_known("data set", name, CATALOGUE)
    return Location(name, None, None)


def open_rows_of(
    name_or_path: str | Path,
    path: str | Path | None,
    split: str,
    image_column: str | None = None,
    label_column: str | None = None,
    labelled: bool = True,
) -> Opened:
    """Open a split of a data set by name, path or hub id.

    A path may be parquet or arrow files named after their splits, one such file, a data set saved by
    `datasets`, one folder per class (of a name: train/ and validation/ or val/ with these in them, whose
    sorted names are then the order of the classes, as it is ImageNet's with WordNet ids), or images with
    annotations in COCO's format, as iNaturalist's authors pack them. Where no validation split is published,
    a tenth of "train" becomes it, as in `atrun.data.load`; where one is published beside a test split,
    "train+validation" is both. Columns are found by their usual names unless they are named; labelled=False
    looks for no labels. Raises what `find` raises, `ValueError` for unknown splits and columns, listing those
    there are, and for files and the network what `atrun.data.in_memory.load` raises.
    """
    location = find(name_or_path, path)
    known = location.known
    from atrun.data.hub import columns_of, open_labelled

    columns = location.columns(image_column, label_column)
    if known is not None and known.domains:
        rows = pacs_rows(known.domains, location.path, split)
        return Opened(rows, *columns_of(rows, *columns, labelled), known)
    if known is not None and known.files:
        require_known(f"split of {name_or_path}", split, known.images)
    files = None if known is None else known.files.get(split)
    return Opened(*open_labelled(location.name, location.path, split, *columns, files, labelled), known)


def _has_class_folders(path: Path) -> bool:
    """Whether a folder holds a folder for each split and, in these, one for each class."""
    names = {name for names in SPLIT_NAMES.values() for name in names}
    if not path.is_dir() or not any(each.name.lower() in names and each.is_dir() for each in path.iterdir()):
        return False
    from atrun.data.hub import is_image_folder  # imported here: `datasets` takes seconds

    return is_image_folder(path)


def _with_held_out(train: int, test: int) -> dict[str, int]:
    """Images per split where a tenth of the published training images is held out for validation."""
    validation = round(VALIDATION_SHARE * train)
    return {"train": train - validation, "validation": validation, "train+validation": train, "test": test}


def _with_both(train: int, validation: int, test: int) -> dict[str, int]:
    """Images per split where all three are published, training and validation images together, too."""
    both = {"train": train, "validation": validation, "train+validation": train + validation}
    return {**both, "test": test}


def _pacs(*domains: str) -> Known:
    # Images of each domain: counted in the copy in the workshop's shared/, which has all 9,991 of the hub's.
    count = {"photo": 1670, "art_painting": 2048, "cartoon": 2344, "sketch": 3929}
    # every domain is divided for itself
    images = {split: sum(len(_split(np.arange(count[each]), split)) for each in domains) for split in SPLITS}
    source = "Li et al. 2017, Deeper, Broader and Artier Domain Generalization, arXiv 1710.03077"
    return Known(PACS, 7, images, "test", source, domains=domains)


INATURALIST = "https://github.com/visipedia/inat_comp"
AIRCRAFT = "https://www.robots.ox.ac.uk/~vgg/data/fgvc-aircraft/"
IMAGENET = "https://www.image-net.org/download.php"
_UNPACK_INATURALIST = f"fetch the images and the annotations from {INATURALIST}, unpack them into one folder"
_CIFAR = "Krizhevsky 2009, Learning Multiple Layers of Features from Tiny Images"
_CIFAR_IMAGES = _with_held_out(50_000, 10_000)

CATALOGUE: dict[str, Known] = {
    # Its published test split has no labels, so there is no such split here. The hub gives the images after a
    # login.
    "imagenet-1k": Known(
        "ILSVRC/imagenet-1k",
        1000,
        {"train": 1_281_167, "validation": 50_000},
        "validation",
        "Russakovsky et al. 2015, ImageNet Large Scale Visual Recognition Challenge, arXiv 1409.0575,"
        " Table 2",
        files={"train": "data/train-*.parquet", "validation": "data/validation-*.parquet"},
    ),
    # The release of fall 2011, which papers mean. It has no splits: a tenth of a folder without them is held
    # out here, so a paper that trains on all of it trains on "train+validation". The hub's copies are packed
    # in shards whose columns are called otherwise, or hold some of the classes.
    "imagenet-21k": Known(
        None,
        21_841,
        {split: count for split, count in _with_held_out(14_197_122, 0).items() if split != "test"},
        "validation",
        "Russakovsky et al. 2015, ImageNet Large Scale Visual Recognition Challenge, arXiv 1409.0575, of the"
        f" state of August 2014; {IMAGENET}",
        f"fetch the archive from {IMAGENET} (after a login; the release of winter 2021 has 19,167 of the"
        " classes), unpack it into FOLDER/train/WORDNET_ID",
    ),
    "cifar10": Known(HUB["cifar10"], 10, _CIFAR_IMAGES, "test", _CIFAR, columns=("img", "label")),
    "cifar100": Known(HUB["cifar100"], 100, _CIFAR_IMAGES, "test", _CIFAR, columns=("img", "fine_label")),
    # Of iNaturalist the hub was found to have parts only; the authors' archives hold images and annotations,
    # train2018.json and val2018.json.
    "inat2017": Known(
        None,
        5089,
        {"train": 579_184, "validation": 95_986},
        "validation",
        "Van Horn et al. 2018, The iNaturalist Species Classification and Detection Dataset, arXiv"
        f" 1707.06642; {INATURALIST}, 2017, Details",
        _UNPACK_INATURALIST,
    ),
    "inat2018": Known(
        None,
        8142,
        {"train": 437_513, "validation": 24_426},
        "validation",
        f"{INATURALIST}, 2018, Details",
        _UNPACK_INATURALIST,
    ),
    # The authors give the sum of both, 268,243, and the classes; 265,213 is what the challenge's copies count
    # as training images.
    "inat2019": Known(
        None,
        1010,
        {"train": 265_213, "validation": 3_030},
        "validation",
        f"{INATURALIST}, 2019, Details",
        _UNPACK_INATURALIST,
    ),
    # The small sets of transfer learning. Papers train on training and validation images together
    # ("train+validation") and report the test split.
    "flowers102": Known(
        "dpdl-benchmark/oxford_flowers102",
        102,
        _with_both(1_020, 1_020, 6_149),
        "test",
        "Nilsback and Zisserman 2008, Automated Flower Classification over a Large Number of Classes;"
        " https://www.robots.ox.ac.uk/~vgg/data/flowers/102/",
    ),
    "pets": Known(
        "timm/oxford-iiit-pet",
        37,
        _with_held_out(3_680, 3_669),
        "test",
        "Parkhi et al. 2012, Cats and Dogs; https://www.robots.ox.ac.uk/~vgg/data/pets/",
    ),
    # Its classes are the 100 variants. The hub's copies need code of their own to be read, or have other
    # classes.
    "aircraft": Known(
        None,
        100,
        _with_both(3_334, 3_333, 3_333),
        "test",
        f"Maji et al. 2013, Fine-Grained Visual Classification of Aircraft, arXiv 1306.5151; {AIRCRAFT}",
        f"fetch the archive from {AIRCRAFT}, lay its images into FOLDER/train/VARIANT,"
        " FOLDER/validation/VARIANT and FOLDER/test/VARIANT, as images_variant_train.txt, _val.txt and"
        " _test.txt list them (a slash in a variant's name as a dash)",
    ),
    "cars": Known(
        "tanganke/stanford_cars",
        196,
        _with_held_out(8_144, 8_041),
        "test",
        "Krause et al. 2013, 3D Object Representations for Fine-Grained Categorization",
    ),
    # The hub calls its test images "validation".
    "food101": Known(
        "ethz/food101",
        101,
        {"train": 75_750, "validation": 25_250},
        "validation",
        "Bossard et al. 2014, Food-101: Mining Discriminative Components with Random Forests;"
        " https://data.vision.ee.ethz.ch/cvl/datasets_extra/food-101/",
    ),
    "pacs": _pacs(*DOMAINS),
    **{f"pacs-{domain.replace('_', '-')}": _pacs(domain) for domain in DOMAINS},
}
