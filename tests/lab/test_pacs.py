"""PACS: its domains and this book's splits of it, on files made here and on the real set where present."""

import datasets
import numpy as np
import pytest
from PIL import Image

from atbook.lab.pacs import DOMAINS, load_pacs
from tests.helpers import shared

CLASSES = ["dog", "elephant", "giraffe"]
COUNTS = {"photo": 20, "art_painting": 30, "cartoon": 40, "sketch": 10}


def rows_in(images):
    return images.pixels[:, 0, 0, 0].tolist()


def write(path, domains):
    """A file in the hub's format; the pixels of every image say its row."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = range(len(domains))
    pictures = [Image.fromarray(np.full((8, 6, 3), row, dtype=np.uint8)) for row in rows]
    columns = {"image": pictures, "domain": domains, "label": [row % 3 for row in rows]}
    kinds = datasets.Image(), datasets.Value("string"), datasets.ClassLabel(names=CLASSES)
    datasets.Dataset.from_dict(columns, datasets.Features(dict(zip(columns, kinds)))).to_parquet(path)
    return path


@pytest.fixture
def mixed(tmp_path):
    """100 rows, the domains mixed; the domain of every row."""
    counted = [domain for domain, count in COUNTS.items() for _ in range(count)]
    domains = np.random.default_rng(1).permutation(counted).tolist()
    return write(tmp_path / "train-00000-of-00001.parquet", domains), domains


def test_a_domain_is_all_and_only_its_images(mixed):
    path, domains = mixed
    for domain in COUNTS:
        images = load_pacs([domain], path, split="all")
        assert rows_in(images) == [row for row in range(100) if domains[row] == domain]
        assert images.targets.tolist() == [row % 3 for row in rows_in(images)]
        assert images.classes == tuple(CLASSES)


def test_splits_are_parts_of_every_domain_without_overlap(mixed):
    path, domains = mixed
    parts = {one: rows_in(load_pacs(DOMAINS, path, split=one)) for one in ("train", "validation", "test")}
    assert sorted(sum(parts.values(), [])) == list(range(100))
    for domain, count in COUNTS.items():
        sizes = {split: sum(domains[row] == domain for row in rows) for split, rows in parts.items()}
        assert sizes == {"train": count * 7 // 10, "validation": count // 10, "test": count * 2 // 10}
        for split, rows in parts.items():  # a domain's split does not depend on which others are loaded
            of_domain = rows_in(load_pacs([domain], path, split=split))
            assert of_domain == [row for row in rows if domains[row] == domain]


def test_real_pacs():
    """The counts of the published set: 9,991 images."""
    folder = shared("data", "pacs96")
    (path,) = folder.glob("*.parquet")
    assert datasets.load_dataset("parquet", data_files=str(path))["train"].num_rows == 9991
    images = load_pacs(["photo"], folder, split="test", size=20, image_size=48)
    assert images.pixels.shape == (20, 3, 48, 48) and images.pixels.float().std() > 40
    assert images.classes == ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
