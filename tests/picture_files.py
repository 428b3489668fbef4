"""Small sets of images in files, in many forms; the colour of every picture says which one it is."""

import io
import json

import datasets
import numpy as np
import pyarrow
from PIL import Image

from atlib.loading import ShardSpec
from atrun.data.transforms import Augmentation

CLASSES = ["cat", "dog", "owl"]
SCALE = {"mean": (0.5,) * 3, "std": (0.25,) * 3}
SMALL = Augmentation(8, three_augment=True, color_jitter=0.3, random_erasing=0.5, **SCALE)
PLAIN = Augmentation(8, crop="centre", flip=0.0, crop_pct=1.0, **SCALE)  # keeps the colour, as the index


def picture(index, size=(16, 12)):
    """One colour per index, so that it survives resizing, cropping and JPEG (within a few steps)."""
    return Image.new("RGB", size, (index % 32 * 8, index // 32 * 8, 100))


def index_of(image):
    """The index of a picture from its tensor (3, height, width), scaled as `atlib.data.Images` does."""
    red, green = ((image[channel].mean().item() * 0.25 + 0.5) * 255 for channel in (0, 1))
    return round(red / 8) + 32 * round(green / 8)


def encoded(image, form="PNG"):
    buffer = io.BytesIO()
    image.save(buffer, form)
    return buffer.getvalue()


def cut_jpeg(index):
    """The first half of a JPEG file: its header is whole, so that only decoding tells."""
    noise = Image.fromarray(np.random.default_rng(index).integers(0, 255, (40, 40, 3), dtype=np.uint8))
    whole = encoded(noise, "JPEG")
    return whole[: len(whole) // 2]


def rows(
    indices,
    corrupt=(),
    image_column="image",
    label_column="label",
    label=datasets.ClassLabel(names=CLASSES),
    labels=None,
    files=None,
    **more,
):
    """A `datasets.Dataset` of pictures, or of `files`; those in `corrupt` are half a JPEG file."""
    files = files or [
        {"bytes": cut_jpeg(i) if i in corrupt else encoded(picture(i)), "path": f"picture{i}.png"}
        for i in indices
    ]
    labels = [i % 3 for i in indices] if labels is None else labels
    features = datasets.Features(
        {image_column: datasets.Image(), label_column: label}
        | {name: datasets.Value("int64") for name in more}
    )
    return datasets.Dataset.from_dict({image_column: files, label_column: labels} | more, features)


def write_parquet(folder, split, indices, parts=1, **options):
    """`indices` in `parts` parquet files, named as the hub names them."""
    folder.mkdir(parents=True, exist_ok=True)
    for part in range(parts):
        file = folder / f"{split}-{part:05d}-of-{parts:05d}.parquet"
        rows(list(indices)[part::parts], **options).to_parquet(file)
    return folder


def write_arrow(folder, split, indices, parts=1, **options):
    """`indices` in `parts` arrow files."""
    folder.mkdir(parents=True, exist_ok=True)
    for part in range(parts):
        table = rows(list(indices)[part::parts], **options).data.table
        with pyarrow.ipc.new_stream(str(folder / f"{split}-{part}.arrow"), table.schema) as stream:
            stream.write_table(table)
    return folder


def write_folders(folder, split, indices, corrupt=()):
    """One folder per class."""
    for index in indices:
        path = folder / split / CLASSES[index % 3] / f"{index:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(cut_jpeg(index) if index in corrupt else encoded(picture(index)))
    return folder


def annotate(folder, name, indices):
    """Images and annotations as iNaturalist packs them; ids with gaps, annotations in another order."""
    for i in indices:
        path = folder / "train_val2018" / CLASSES[i % 3] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture(i).save(path)
    found = {
        "categories": [{"id": 10 * k, "name": name} for k, name in reversed(list(enumerate(CLASSES)))],
        "images": [{"id": 100 + i, "file_name": f"train_val2018/{CLASSES[i % 3]}/{i}.png"} for i in indices],
        "annotations": [
            {"id": i, "image_id": 100 + i, "category_id": 10 * (i % 3)} for i in reversed(indices)
        ],
    }
    (folder / name).write_text(json.dumps(found))


def all_batches(photos, workers=0, **part):
    return list(photos.epoch(ShardSpec(**({"seed": 3, "epoch": 1, "batch_size": 5} | part)), workers))


def pictures_in(batches):
    """What is really in the batches that count, told by colour."""
    return [index_of(image) for batch in batches if batch.weight > 0 for image in batch.images]
