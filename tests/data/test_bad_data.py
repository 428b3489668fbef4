"""One table of what is refused, by the kind of error and the argument that it names."""

from dataclasses import replace

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, RandomSampler, WeightedRandomSampler

from atbook.lab.other_images import other_of_class
from atfamily.map_cache import MapCache
from atfamily.measures.subsets import accuracy_on
from atlib.data import Images, as_data, crop_and_flip, pair
from atlib.loading import ShardSpec
from atlib.vit import create_vit
from atrun.data import Augmentation
from atrun.data.decoding import CorruptImage, decode
from atrun.data.natural_shifts import IMAGENET, IMAGENET_A
from atrun.data.photos import open_photos
from atrun.data.stream import PhotoStream, open_stream
from atrun.data.views import looks, small_views
from tests.picture_files import CLASSES, PLAIN, annotate, encoded, picture, write_arrow, write_parquet

IMAGE = torch.zeros(3, 8, 8)
PIXELS = torch.zeros(4, 3, 8, 8, dtype=torch.uint8)
MANY = Images(PIXELS, torch.tensor([0, 0, 0, 7]))


def numbered(here):
    """A picture whose label is below 0."""
    columns = {"image": [picture(0)], "label": [-1]}
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    datasets.Dataset.from_dict(columns, features).to_parquet(here / "test.parquet")
    return opened(here)


def opened(here, **options):
    return open_photos(here, **{"split": "test"} | options)


def of_file(kind, values):
    image = Image.fromarray(np.array([values], dtype=kind))
    return decode({"bytes": encoded(image, "TIFF"), "path": None})


def streamed(here, count=23, classes=CLASSES):
    """A stream of 23 images that is told another number, or fewer classes."""
    write_arrow(here, "train", range(23))
    stream = open_stream(here, split="train+validation", augmentation=PLAIN)
    wrong = PhotoStream(stream.rows, count, "image", "label", classes, augmentation=PLAIN)
    return list(wrong.epoch(ShardSpec(0, 0, 5)))


def sampled(sampler, **options):
    return as_data(DataLoader(MANY, sampler=sampler, **options))


def cached(here, change):
    vit = create_vit({"img_size": 8, "patch_size": 4, "embed_dim": 8, "depth": 1, "num_heads": 2})
    cache, images = MapCache(here, vit), torch.randn(2, 3, 8, 8)
    cache.add(images)
    return change(cache, images)


def cifar100(here):
    columns = {"image_column": "image", "label_column": "label"}
    path = write_parquet(here, "test", [0, 1])
    return open_photos("cifar100", path=path, split="test", **columns)


def arrow(here, **options):
    images = write_arrow(here, "test", range(23))
    return open_stream(images, **{"split": "test", "augmentation": PLAIN} | options)


def of_two_years(here):
    annotate(here, "val2017.json", range(3))
    annotate(here, "val2018.json", range(3))
    return opened(here)


def views_of_pairs(here):
    return next(pair(MANY, MANY).with_augment(small_views(looks((0.2, 1)))).epoch(ShardSpec(0, 0, 4)))


def among(labels, classes):
    return lambda here: accuracy_on(torch.zeros(2, 4), torch.tensor(labels), classes)


def augmented(**values):
    return lambda here: Augmentation(**values)


# {the kind of error: {what is wrong: what is asked}}
BAD = {
    ValueError: {
        "two years in a folder": of_two_years,
        "a crane, of two kinds": lambda here: IMAGENET.indices(["crane"]),
        "a number beyond 999": lambda here: IMAGENET.indices([3, 1000]),
        "a number below 0": lambda here: IMAGENET.indices([-1]),
        "a number among 200 classes": lambda here: IMAGENET_A.indices([3]),
        "an id not among 200": lambda here: IMAGENET_A.indices(["n01440764"]),
        "fewer targets": lambda here: Images(PIXELS, torch.zeros(2)),
        "pixels as floats": lambda here: Images(PIXELS.float(), torch.zeros(4)),
        "reflected too far": lambda here: crop_and_flip(8)(PIXELS, torch.arange(4)),
        "twins scaled otherwise": lambda here: pair(MANY, replace(MANY, mean=0.5, std=0.5)),
        "views of pairs": views_of_pairs,
        "a class of one image": lambda here: other_of_class(MANY, True, 0),
        "maps of another scaling": lambda here: cached(here, lambda cache, x: cache(x + 1e-6)),
        "maps not finite": lambda here: cached(here, lambda cache, x: cache.add(x * torch.inf)),
        "bytes": lambda here: as_data([(IMAGE.byte(), 1)]),
        "a weighted sampler": lambda here: sampled(WeightedRandomSampler([1.0] * 4, 4)),
        "drawn with replacement": lambda here: sampled(RandomSampler(MANY, replacement=True)),
        "fewer than there are": lambda here: sampled(RandomSampler(MANY, num_samples=3)),
        "shares in another order": augmented(scale=(0.5, 0.2)),
        "a middle of nothing": augmented(crop_pct=0),
        "two changes of colour": augmented(rand_augment="rand-m9", three_augment=True),
        "jitter beside RandAugment": augmented(rand_augment="rand-m9", color_jitter=0.4),
        "a label not among the classes": among([0, 3], [1, 2]),
        "another set": cifar100,
        "labels withheld": lambda here: opened(write_parquet(here, "test", [0, 1], labels=[0, -1])),
        "a negative number": numbered,
        "a class that a stream lacks": lambda here: streamed(here, classes=CLASSES[:2]),
        "another number of images": lambda here: arrow(here, count=20),
        "a stream that goes on": lambda here: streamed(here, 20),
        "a stream that ends": lambda here: streamed(here, 25),
    },
    CorruptImage: {
        "floats beyond 255": lambda here: of_file("float32", [0, 300]),
        "floats below 0": lambda here: of_file("float32", [-0.5, 1]),
        "numbers beyond 16 bits": lambda here: of_file("int32", [0, 70000]),
    },
}


@pytest.mark.parametrize("kind, name", [(kind, name) for kind, rows in BAD.items() for name in rows])
def test_what_cannot_be_meant_is_refused(tmp_path, kind, name):
    with pytest.raises(kind):
        BAD[kind][name](tmp_path)
