"""PACS: the same seven classes as photographs, art paintings, cartoons and sketches."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from atlib.data import Images, decode, draw
from atlib.names import require_known

HUB = "flwrlabs/pacs"
DOMAINS = ("photo", "art_painting", "cartoon", "sketch")
SPLITS = ("train", "validation", "test", "all")
VALIDATION_SHARE, TEST_SHARE = 0.1, 0.2  # of every domain


def load_pacs(domains: Sequence[str], path: str | Path | None = None, *, split: str = "train", size: int | None = None, seed: int = 0,
              image_size: int | None = None) -> Images:
    """Load a split of some domains of PACS; classes are indices into `Images.classes`, the same in every domain.

    domains: some of `DOMAINS`. path: a parquet file or a folder of them in the hub's format (None: from the hub).
    split: "train", "validation", "test" or "all". The hub's copy has no splits, so they are this book's own and not the published
    ones: a fixed tenth of every domain for validation, a fifth for test, by position in the file, hanging on no seed.
    size, seed, image_size: as in `atlib.data.load`.

    Raises `ValueError` for unknown domains and splits and for missing columns, and what `load` raises for files and the network.
    Source: Li et al. 2017, "Deeper, Broader and Artier Domain Generalization" (arXiv 1710.03077).
    """
    from atlib.hub import class_names  # imported here: `datasets` takes seconds

    rows, image_column, label_column = pacs_rows(domains, path, split)
    rows = rows.select(draw(len(rows), size, seed, f"PACS {', '.join(domains)} {split}"))
    return Images(decode(rows, image_column, image_size), torch.tensor(rows[label_column][:]), class_names(rows, label_column))


def pacs_rows(domains: Sequence[str], path: str | Path | None, split: str):
    """The rows of a split of some domains, undecoded, as a `datasets.Dataset`, and its image and label column; see `load_pacs`."""
    if isinstance(domains, str) or len(domains) == 0:
        raise ValueError(f"domains must be a list with at least one of {', '.join(DOMAINS)}, got {domains!r}")
    for domain in domains:
        require_known("domain of PACS", domain, DOMAINS)
    require_known("split of PACS", split, SPLITS)
    from atlib.hub import find_column, open_rows

    rows = open_rows(HUB, path, "train")
    domain_of = np.array(rows[find_column(rows, ("domain",), "domain")][:])
    image_column, label_column = find_column(rows, ("image",), "image"), find_column(rows, ("label",), "label")
    missing = [domain for domain in domains if domain not in domain_of]
    if missing:
        raise ValueError(f"the data have no image of {', '.join(missing)}, only of {', '.join(sorted(set(domain_of)))}")
    # A set, in the file's order: naming a domain twice, or in another order, changes nothing.
    wanted = np.sort(np.concatenate([_split(np.flatnonzero(domain_of == domain), split) for domain in set(domains)]))
    return rows.select(wanted), image_column, label_column


def _split(positions: np.ndarray, split: str) -> np.ndarray:
    """The part of one domain's positions that a split is."""
    if split == "all":
        return positions
    shuffled = np.random.default_rng(0).permutation(positions)  # fixed: the parts must never depend on a run's seed
    validation, test = round(VALIDATION_SHARE * len(shuffled)), round(TEST_SHARE * len(shuffled))
    parts = dict(zip(("validation", "test", "train"), np.split(shuffled, [validation, validation + test])))
    return parts[split]
