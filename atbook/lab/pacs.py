"""PACS: seven classes as photographs, art paintings, cartoons and sketches, in this book's splits."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from atlib.data import Images
from atrun.data.catalogue import VALIDATION_SHARE, fixed_order
from atrun.data.photos import images_in_memory

PACS = "flwrlabs/pacs"
DOMAINS = ("photo", "art_painting", "cartoon", "sketch")
SPLITS = ("validation", "test", "train", "all")
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
    """Load a split of some domains of PACS (Li et al. 2017, arXiv 1710.03077), with the same classes in every
    domain.

    domains: some of `DOMAINS`. path: a parquet file or a folder of them in the hub's format (None: from the
    hub). split: "train", "validation", "test" or "all". The hub's copy has no splits: these are a fixed tenth
    of every domain for validation and a fifth for test, by position in the file. Others: as in
    `atrun.data.photos.load`, whose errors it raises too.
    """
    from atrun.data.hub import open_rows  # imported here: `datasets` takes seconds

    rows = open_rows(PACS, path, "train")
    domain_of, chosen = np.array(rows["domain"][:]), []
    # A set, in the file's order: naming a domain twice, or in another order, changes nothing.
    for domain in set(domains):
        positions = np.flatnonzero(domain_of == domain)
        if not len(positions):
            raise ValueError(f"the data have no image of {domain}")
        shuffled = positions[fixed_order(len(positions))]
        validation, test = round(VALIDATION_SHARE * len(shuffled)), round(TEST_SHARE * len(shuffled))
        parts = np.split(shuffled, [validation, validation + test])
        chosen.append(dict(zip(SPLITS, (*parts, positions)))[split])
    rows = rows.select(np.sort(np.concatenate(chosen)))
    return images_in_memory(rows, "image", "label", size, seed, image_size, f"PACS {domains} {split}")
