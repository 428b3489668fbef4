"""Detection data in COCO's form, a folder of images and a file of annotations: read and jittered."""

import copy
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import torch
from PIL import Image
from PIL.ExifTags import Base
from torch import Tensor, nn
from torchvision.ops import box_convert, clip_boxes_to_image, masks_to_boxes
from torchvision.transforms import functional as vision

from atfamily.detection.objects import Found, ObjectBatch, Objects, check_objects
from atlib.loading import Batch, ShardSpec, draw_below, in_order, loader_of, my_seeded_batches
from atlib.pair import IMAGENET
from atrun.data.decoding import CorruptImage, as_rgb, in_eight_bits, large_pictures

# Edges in annotations are rounded; one that lies further out of its image than this is an error.
ROUNDING = 1.0  # pixels


class Placed(NamedTuple):
    """Where an image of COCO lies in the square that a ViT is shown. scale: of the image; left, top: which
    pixel of the scaled image is the square's first; flipped: left and right exchanged, before all."""

    scale: float
    left: int
    top: int
    flipped: bool


class CocoObjects:
    """Images in COCO's form with their `Objects`, read from disk when they are asked for, each in a square of
    `size` pixels: what `atlib.train.train` takes, and what `detect` evaluates.

    images: the folder of image files. annotations: the JSON file, whose categories become classes in the
    order of their ids. jitter: the range of large-scale jitter (Ghiasi et al. 2021, arXiv 2012.07177), for
    training: the longer side becomes a random share of `size`, a random part is cut out where it is larger,
    and half of the images are flipped; None: the longer side fits, at the upper left. What is left of the
    square is the mean colour. masks: whether pixels are read, too.
    """

    normalisation = IMAGENET  # how the images come out; COCO's models are started from it
    corrupt: Mapping[int, str] = {}  # an image that cannot be decoded is an error

    def __init__(
        self,
        images: str | Path,
        annotations: str | Path,
        *,
        size: int,
        jitter: tuple[float, float] | None = None,
        masks: bool = True,
        workers: int = 0,
    ):
        self.folder, self.file = Path(images), Path(annotations)
        self.size, self.jitter, self.masks, self.workers = size, jitter, masks, workers
        self.entries, self._annotations, categories = _read(self.file, masks)
        self.classes = tuple(str(category.get("name", category["id"])) for category in categories)
        self._number = {category["id"]: number for number, category in enumerate(categories)}
        names = [entry["file_name"] for entry in self.entries]
        if absent := [name for name in names if not (self.folder / name).is_file()]:
            raise FileNotFoundError(f"{self.folder} lacks {len(absent)} images of {self.file}: {absent[0]}")

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def source_files(self) -> list[str]:
        """What is read: the images, and the annotations."""
        return [str(self.folder / entry["file_name"]) for entry in self.entries] + [str(self.file)]

    def select(self, indices: Sequence[int]) -> "CocoObjects":
        """Some of the images, in the order of `indices`."""
        chosen = copy.copy(self)
        chosen.entries = [self.entries[index] for index in indices]
        return chosen

    def original(self, number: int) -> Objects:
        """What is in an image, in its own pixels."""
        entry = self.entries[number]
        height, width = entry["height"], entry["width"]
        annotated = self._annotations[entry["id"]]
        boxes = torch.tensor([item["bbox"] for item in annotated], dtype=torch.float32).reshape(-1, 4)
        boxes = clip_boxes_to_image(box_convert(boxes, "xywh", "xyxy"), (height, width))
        labels = torch.tensor([self._number[item["category_id"]] for item in annotated], dtype=torch.long)
        crowd = torch.tensor([bool(item.get("iscrowd", 0)) for item in annotated], dtype=torch.bool)
        masks = None
        if self.masks:
            masks = torch.zeros(len(annotated), height, width, dtype=torch.bool)
            for mask, item in zip(masks, annotated):
                mask[:] = self._pixels(item, height, width)
        name = f"{self.file}, image {entry['id']}"
        return check_objects(Objects(boxes, labels, masks, crowd), height, width, name)

    def areas(self, number: int) -> list[dict[str, float]]:
        """{"area": of its mask, in squared pixels} for each object of an image; {} where not said."""
        objects = self._annotations[self.entries[number]["id"]]
        return [{"area": float(item["area"])} if item.get("area") else {} for item in objects]

    def placed(self, number: int, seed: int | None) -> Placed:
        """Where an image lies in its square; seed None: as for evaluation."""
        entry = self.entries[number]
        longer = max(entry["height"], entry["width"])
        if seed is None or self.jitter is None:
            return Placed(self.size / longer, 0, 0, False)
        draws = torch.tensor([seed])
        share, across, down = (draw_below(draws, which, 1 << 20).item() / (1 << 20) for which in range(3))
        low, high = self.jitter
        scale = (low + share * (high - low)) * self.size / longer
        room = [max(0, side - self.size) for side in _scaled(scale, entry["width"], entry["height"])]
        left, top = int(across * (room[0] + 1)), int(down * (room[1] + 1))
        return Placed(scale, left, top, bool(draw_below(draws, 3, 2).item()))

    def one(self, number: int, seed: int | None) -> tuple[Tensor, Objects]:
        """An image, float32 (3, size, size), and what is visible of its objects in it."""
        place = self.placed(number, seed)
        pixels = place_image(self._decoded(number), place, self.size)
        width, height = (self.entries[number][side] for side in ("width", "height"))
        return pixels, place_objects(self.original(number), place, width, height, self.size)

    def take(self, indices: Sequence[int]) -> tuple[Tensor, ObjectBatch]:
        """The images at `indices` as evaluation sees them, float32 (B, 3, size, size), and their objects."""
        images, objects = zip(*(self.one(index, None) for index in indices))
        return torch.stack(images), ObjectBatch(objects)

    def batches(self, parts: Iterable[Sequence[int]]) -> Iterator[tuple[Tensor, ObjectBatch]]:
        """`take` of each part, read by the workers ahead of time."""
        return iter(loader_of(self.take, parts, self.workers))

    def loader(self, batch_size: int) -> Iterator[tuple[Tensor, ObjectBatch]]:
        """All images in order, as evaluation sees them."""
        return self.batches(in_order(len(self), batch_size))

    def epoch(self, part: ShardSpec, workers: int = 0) -> Iterator[Batch]:
        """One process's batches of one epoch, read by `workers` processes ahead of time (0: by this one).
        Order and jitter hang on seed, epoch and index alone."""
        return iter(loader_of(self._share, my_seeded_batches(len(self), part), workers))

    def back(self, number: int, detection: Found) -> Found:
        """What `detect` found in an image as evaluation sees it, in the image's own pixels."""
        entry = self.entries[number]
        width, height = entry["width"], entry["height"]
        across, down = _scaled(self.placed(number, None).scale, width, height)
        factors = torch.tensor([width / across, height / down] * 2)
        boxes = (detection.boxes * factors).minimum(torch.tensor([width, height] * 2))
        masks = detection.masks
        if masks is not None:
            inside = masks[:, None, :down, :across].float()
            masks = nn.functional.interpolate(inside, (height, width), mode="bilinear")[:, 0] > 0.5
        return Found(boxes, detection.labels, detection.scores, masks)

    def _pixels(self, annotation: dict, height: int, width: int) -> Tensor:
        """The mask of one annotation, polygons or run lengths: bool (height, width)."""
        from pycocotools import mask as run_lengths

        packed = annotation["segmentation"]
        try:
            if isinstance(packed, list):
                packed = run_lengths.merge(run_lengths.frPyObjects(packed, height, width))
            elif isinstance(packed["counts"], list):
                packed = run_lengths.frPyObjects(packed, height, width)
            else:
                packed = packed | {"counts": packed["counts"].encode()}
                if packed["counts"] and packed["counts"][-1] - 48 & 32:
                    raise ValueError("they would be read on beyond their end")
            pixels = run_lengths.decode(packed)
            if run_lengths.encode(pixels)["counts"] != packed["counts"]:
                raise ValueError("the rest is whatever lay in memory")
        except (ValueError, OverflowError) as error:
            where = f"{self.file}, annotation {annotation['id']}"
            raise ValueError(f"{where}: run lengths do not fill the image ({error})") from error
        return torch.from_numpy(pixels.astype(bool))

    def _share(self, share: tuple[list[tuple[int, int]], float]) -> Batch:
        wanted, weight = share
        images, objects = zip(*(self.one(index, seed) for index, seed in wanted))
        return Batch(torch.stack(images), ObjectBatch(objects), [index for index, _ in wanted], weight)

    def _decoded(self, number: int) -> Image.Image:
        entry = self.entries[number]
        path, size = self.folder / entry["file_name"], (entry["width"], entry["height"])
        try:
            with large_pictures(), Image.open(path) as file:
                stored, turn = file.size, file.getexif().get(Base.Orientation, 1)
                picture = in_eight_bits(file).convert("RGB")
                shown = as_rgb(file) if turn in range(2, 9) else picture
        except Exception as error:  # PIL raises half a dozen kinds for a damaged file
            raise CorruptImage(f"{path} cannot be decoded ({error})") from error
        if size not in (stored, shown.size):
            raise ValueError(f"{path} is {stored} pixels, {self.file} says {size} of image {entry['id']}")
        if shown is not picture and stored == shown.size:
            raise ValueError(f"{path} is turned by EXIF ({turn}): its boxes may be of either view")
        return picture if size == stored else shown  # boxes are of the view whose size the annotations say


def place_image(picture: Image.Image, place: Placed, size: int) -> Tensor:
    """The part of a picture that lies in the square, and 0 beside it: float32 (3, size, size), normalised."""
    if place.flipped:
        picture = vision.hflip(picture)
    across, down = _scaled(place.scale, *picture.size)
    picture = picture.resize((across, down), Image.Resampling.BILINEAR)
    right, bottom = min(across, place.left + size), min(down, place.top + size)
    picture = picture.crop((place.left, place.top, right, bottom))
    pixels = vision.normalize(vision.to_tensor(picture), IMAGENET.mean, IMAGENET.std)
    return vision.pad(pixels, [0, 0, size - picture.width, size - picture.height])


def place_objects(objects: Objects, place: Placed, width: int, height: int, size: int) -> Objects:
    """What lies in the square of objects of an image of that width and height in pixels, but for what is less
    than a pixel. A box that the square's edge cuts holds the pixels that are left, where masks tell which."""
    boxes, labels, masks, crowd = objects
    if place.flipped:
        boxes = torch.stack([width - boxes[:, 2], boxes[:, 1], width - boxes[:, 0], boxes[:, 3]], dim=1)
        masks = None if masks is None else masks.flip(-1)
    corner = torch.tensor([place.left, place.top] * 2)
    across, down = _scaled(place.scale, width, height)
    # as the picture, which has whole pixels
    moved = boxes * torch.tensor([across / width, down / height] * 2) - corner
    boxes = moved.clamp(0, size)
    seen = torch.ones(len(boxes), dtype=torch.bool)
    if masks is not None:
        whole = torch.zeros(len(masks), size, size, dtype=torch.bool)
        # "nearest" would move masks up and left against the image, by up to half a pixel
        scaled = nn.functional.interpolate(masks[:, None].float(), (down, across), mode="nearest-exact")[:, 0]
        part = scaled[:, place.top : place.top + size, place.left : place.left + size] > 0
        whole[:, : part.shape[1], : part.shape[2]] = part
        masks, seen = whole, whole.flatten(1).any(1)
        cut = ((moved - boxes).abs() >= 1).any(1) & seen
        around = masks_to_boxes(masks[cut]) + torch.tensor([0, 0, 1, 1])  # whose last pixel is inside
        boxes[cut, :2] = boxes[cut, :2].maximum(around[:, :2])
        boxes[cut, 2:] = boxes[cut, 2:].minimum(around[:, 2:])
    left = ((boxes[:, 2:] - boxes[:, :2]) >= 1).all(1) & seen
    return Objects(boxes[left], labels[left], None if masks is None else masks[left], crowd[left])


def _scaled(scale: float, *sides: int) -> list[int]:
    """The sides of a scaled image, in whole pixels."""
    return [max(1, round(scale * side)) for side in sides]


def _read(file: Path, masks: bool) -> tuple[list[dict], dict[int, list[dict]], list[dict]]:
    """Images, annotations by image and categories of a file, the first and last in the order of their ids."""
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
        by_id = itemgetter("id")
        images, categories = (sorted(read[name], key=by_id) for name in ("images", "categories"))
        annotations = read["annotations"]
        for entries in (images, annotations, categories):
            if len(set(map(by_id, entries))) < len(entries):
                raise ValueError("an id comes twice")
        if not images:
            raise ValueError("it lists no images")
        sizes = {image["id"]: (image["width"], image["height"]) for image in images if image["file_name"]}
        by_image: dict[int, list[dict]] = {image["id"]: [] for image in images}
        category_ids = set(map(by_id, categories))
        for item in annotations:
            if item["category_id"] not in category_ids or not _usable(item, *sizes[item["image_id"]], masks):
                raise ValueError(f"annotation {item['id']}: its category, its box or its mask does not fit")
            by_image[item["image_id"]].append(item)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is not in COCO's form: {type(error).__name__}, {error}") from error
    return images, by_image, categories


def _usable(annotation: dict, width: int, height: int, masks: bool) -> bool:
    """Whether its box has area and lies in its image, but for rounding, and whether its mask can be drawn."""
    x, y, across, down = map(float, annotation["bbox"])
    for start, length, side in ((x, across, width), (y, down, height)):
        if not (length > 0 and -ROUNDING <= start < side and 0 < start + length <= side + ROUNDING):
            return False  # also where a number is NaN
    if not masks:
        return True
    segmentation = annotation["segmentation"]
    if isinstance(segmentation, list):  # of four numbers pycocotools would make a box
        return bool(segmentation) and all(len(side) >= 6 and len(side) % 2 == 0 for side in segmentation)
    return segmentation["size"] == [height, width]
