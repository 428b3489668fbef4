"""What goes in: images with labels in memory, and torch's own `Dataset` or `DataLoader`."""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    default_collate,
)
from torchvision import transforms
from torchvision.transforms import v2

from atlib.loading import (
    Batch,
    EvaluationData,
    ShardSpec,
    TrainingData,
    as_is,
    augmentation_seeds,
    draw_below,
    in_order,
    loader_of,
    my_batches,
    my_repeats,
    my_seeded_batches,
    rng_put_back,
    seed_generators,
)
from atlib.pair import Normalisation

# The target of an image whose class is not known: PyTorch's cross-entropy passes over it too.
UNLABELLED = -100
# (uint8 images (B, C, height, width), what is drawn for each: the seeds, int64 (B,)) -> other such images, or
# several views of each, (B, views, C, height, width)
Augment = Callable[[Tensor, Tensor], Tensor]


@dataclass(eq=False, repr=False)
class Images(Dataset):
    """Images in memory with their targets. `images[i]` is one (image, target), `images.take([...])` a batch;
    `dataclasses.replace(images, pixels=...)` are others with the rest as it is.

    pixels: uint8 (n, 3, height, width), or (n, 2, 3, height, width) with what the teacher sees second
    (`pair`). targets: (n, ...), class indices or what a pre-text task regresses. An image comes out as
    float32, (pixel / 255 - mean) / std, with one number for all channels or one for each. augment: changes
    the images that `epoch` hands out, both of a pair alike. Batches are made where the pixels are (`to`).
    """

    pixels: Tensor
    targets: Tensor
    classes: Sequence[str] = ()
    mean: float | tuple[float, ...] = 0.5
    std: float | tuple[float, ...] = 0.25
    augment: Augment | None = None

    corrupt: ClassVar[Mapping[int, str]] = {}  # pixels in memory are decoded already
    source = None  # what they were read from

    def __post_init__(self):
        pixels, self.classes = self.pixels, tuple(self.classes)
        if len(pixels) != len(self.targets):
            raise ValueError(f"{len(pixels)} images, but {len(self.targets)} targets")
        if pixels.dtype != torch.uint8 or pixels.ndim not in (4, 5):
            raise ValueError(f"pixels are uint8 (n, 3, h, w), got {pixels.dtype} {tuple(pixels.shape)}")

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        images, targets = self.take([index])
        return images[0], targets[0]

    def take(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The batch at `indices` as evaluation sees it: float32 (B, 3, height, width) and its targets."""
        index = torch.as_tensor(indices)
        return self._scaled(self.pixels[index]), self.targets[index]

    __getitems__ = take  # a DataLoader then fetches a batch in one call, a hundred times faster

    def loader(self, batch_size: int, *, seed: int | None = None) -> DataLoader:
        """A DataLoader of (images, targets) as evaluation sees them, every image once: in order, or shuffled
        anew each epoch by a seed."""
        # Both generators are its own: evaluating in the middle of a training run shall not change the run.
        order = None if seed is None else RandomSampler(self, generator=torch.Generator().manual_seed(seed))
        return DataLoader(self, batch_size, sampler=order, collate_fn=as_is, generator=torch.Generator())

    def epoch(self, part: ShardSpec, workers: int = 0) -> Iterator[Batch]:
        """One process's batches of one epoch, augmented, without workers."""
        shares, device = zip(my_batches(len(self), part), my_repeats(len(self), part)), self.pixels.device
        for (indices, weight), repeats in shares:
            index = torch.as_tensor(indices, device=device)
            pixels = self.pixels[index]
            if self.augment is not None:
                seeds = augmentation_seeds(part, index, torch.as_tensor(repeats, device=device))
                # a pair as one image of six channels, so that both are cut and turned alike
                augmented = self.augment(pixels.flatten(1, -3), seeds)
                if augmented.ndim == 4:  # not views of single images: put back into pairs
                    augmented = augmented.reshape(*pixels.shape[:-2], *augmented.shape[-2:])
                pixels = augmented
            yield Batch(self._scaled(pixels), self.targets[index], indices, weight)

    @property
    def normalisation(self) -> Normalisation:
        """How the images come out."""
        return Normalisation(self.mean, self.std)

    def _scaled(self, pixels: Tensor) -> Tensor:
        mean, std = (
            torch.as_tensor(value, device=pixels.device).reshape(-1, 1, 1) for value in (self.mean, self.std)
        )
        # A tensor: a GPU divides by a number through its inverse, and then `MapCache` knows no image.
        highest = torch.tensor(255.0, device=pixels.device)
        return (pixels.float() / highest - mean) / std

    def to(self, device: torch.device | str) -> "Images":
        """The same images on a device, where training then takes and augments them."""
        return replace(self, pixels=self.pixels.to(device), targets=self.targets.to(device))

    def with_augment(self, augment: Augment | None) -> "Images":
        """The same images with another augmentation."""
        return replace(self, augment=augment)

    def select(self, indices: Sequence[int]) -> "Images":
        """The images at `indices`, in that order, or where a mask (n,) of bool is True."""
        index = torch.as_tensor(indices)
        index = index if index.dtype == torch.bool else index.long()
        return replace(self, pixels=self.pixels[index], targets=self.targets[index])


def pair(images: Images, teacher_images: Images) -> Images:
    """For the student `images`, with their labels, and for its teacher `teacher_images[i]` beside each."""
    _check_scaling(images, teacher_images)
    return replace(images, pixels=torch.stack([images.pixels, teacher_images.pixels], dim=1))


def with_unlabelled(images: Images, more: Images) -> Images:
    """`images`, and after them those of `more` without their labels (`UNLABELLED`), which a task's loss
    leaves out."""
    _check_scaling(images, more)
    if images.targets.ndim != 1 or images.targets.is_floating_point():
        raise ValueError(f"targets are {images.targets.dtype}, not class indices")
    unknown = images.targets.new_full((len(more),), UNLABELLED)
    pixels, targets = torch.cat([images.pixels, more.pixels]), torch.cat([images.targets, unknown])
    return replace(images, pixels=pixels, targets=targets)


def _check_scaling(images: Images, others: Images) -> None:
    if images.normalisation != others.normalisation:
        raise ValueError(f"images are scaled by {images.normalisation} and {others.normalisation}")


def crop_and_flip(padding: int = 4) -> Augment:
    """The usual CIFAR augmentation: reflect-pad, random crop back to size, random horizontal flip."""

    def augment(images: Tensor, seeds: Tensor) -> Tensor:
        if padding >= min(images.shape[-2:]):
            raise ValueError(f"padding={padding} reflects more than {tuple(images.shape[-2:])} pixels")
        top, left = (draw_below(seeds, number, 2 * padding + 1) - padding for number in (0, 1))
        return cut_out(images, top, left, draw_below(seeds, 2, 2).bool(), images.shape[-2:])

    return augment


def cut_out(images: Tensor, top: Tensor, left: Tensor, mirrored: Tensor, size: Sequence[int]) -> Tensor:
    """Of each image (B, C, h, w) the part of `size`, (height, width), that begins at (top, left), each (B,);
    beyond an edge are reflected pixels."""

    # instead of padding and cutting, every pixel is fetched from where it would have been: (B, length)
    def reflected(first: Tensor, side: int, length: int) -> Tensor:
        place = first[:, None] + torch.arange(length, device=first.device)
        return side - 1 - (side - 1 - place.abs()).abs()

    rows, columns = map(reflected, (top, left), images.shape[-2:], size)
    columns = torch.where(mirrored[:, None], columns.flip(1), columns)
    channels, width = images.shape[1], images.shape[3]
    cut = images.gather(2, rows[:, None, :, None].expand(-1, channels, -1, width))
    return cut.gather(3, columns[:, None, None, :].expand(-1, channels, rows.shape[1], -1))


UNSCALED = 25.0  # a pixel that is normalised lies within some 5 of 0


class TorchData:
    """A torch `Dataset` of (image, label), in the order and the shares of this project. An image is a float32
    tensor (3, height, width), all of one size; a label a whole number or a tensor. collate: makes (images,
    targets) of a list of items. workers: processes that read; initialise: called with its number in each.

    While an item is read, the global generators of Python, NumPy and torch (on the CPU) start from a seed of
    its own, so that what random transforms draw hangs on run, pass and index alone.
    """

    corrupt: Mapping[int, str] = {}  # what cannot be read raises the data set's own error

    def __init__(
        self,
        dataset: Dataset,
        collate: Callable[[list], tuple[Tensor, Tensor]] = default_collate,
        workers: int = 0,
        initialise: Callable[[int], None] | None = None,
    ):
        self.dataset, self.collate, self.workers, self.initialise = dataset, collate, workers, initialise
        self.normalisation = normalisation_of(dataset)
        if len(self):
            images, _ = self.take([0])  # an item of another form is found out now
            if UNSCALED < (largest := images.abs().max().item()) < math.inf:
                says = f"an image has values up to {largest:.0f}: pixels of 0 to 1, normalised, are expected"
                warnings.warn(says, stacklevel=2)

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def source_files(self) -> list[str]:
        """What torchvision's folders of images read; those of other data sets are not told."""
        samples = getattr(self.dataset, "samples", None)
        samples = samples if isinstance(samples, list) else ()
        return [sample[0] for sample in samples if isinstance(sample, tuple) and isinstance(sample[0], str)]

    def take(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The batch at `indices`, as evaluation sees it."""
        return self._make([(index, index) for index in indices])

    def loader(self, batch_size: int) -> DataLoader:
        """A DataLoader of (images, targets) in order, every image once."""
        return loader_of(self.take, in_order(len(self), batch_size), self.workers, initialise=self.initialise)

    def epoch(self, part: ShardSpec, workers: int = 0) -> Iterator[Batch]:
        """One process's batches of an epoch, read by `workers` processes (0: as many as this was made
        with)."""
        shares, workers = my_seeded_batches(len(self), part), workers or self.workers
        return iter(loader_of(self._share, shares, workers, pin=True, initialise=self.initialise))

    def _share(self, share: tuple[list[tuple[int, int]], float]) -> Batch:
        wanted, weight = share
        return Batch(*self._make(wanted), [index for index, _ in wanted], weight)

    def _make(self, wanted: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """The items at (index, seed of what their transforms draw); runs in a worker."""
        with rng_put_back():  # once for all, since it takes longer than to read a small item
            items = []
            for index, seed in wanted:
                seed_generators(seed)
                try:
                    items.append(self.dataset[index])
                except Exception as error:
                    error.add_note(f"while item {index} of this {type(self.dataset).__name__} was read")
                    raise
            seed_generators([wanted[0][1], 1])  # another stream than the first item's
            batch = self.collate(items)
        if isinstance(batch, (tuple, list)) and len(batch) == 2 and all(isinstance(p, Tensor) for p in batch):
            images, targets = batch
            fits = images.dtype == torch.float32 and images.ndim in (4, 5)
            if fits and len(images) == len(targets) == len(items):
                classes = targets.ndim == 1 and not targets.is_floating_point()
                return images, targets.long() if classes else targets
        needed = "float32 images (n, 3, h, w) and targets"
        raise ValueError(f"of {len(items)} items {batch!r:.200} was made, not {needed}")


def as_data(data: Any, batch_size: int | None = None) -> TrainingData | EvaluationData:
    """Data that have an `epoch`, or `loader` and `take`, as they are, and a torch `Dataset` or `DataLoader`
    as `TorchData`. A recipe's batch_size takes the place of a DataLoader's, with a warning."""
    # torchvision's ImageFolder has a `loader`, too, and data sets of `datasets` have a `take`
    if callable(getattr(data, "epoch", None)) or hasattr(data, "loader") and hasattr(data, "take"):
        return data
    dataset = data.dataset if isinstance(data, DataLoader) else data
    if isinstance(dataset, IterableDataset):
        raise ValueError(f"a {type(dataset).__name__} has no index: give one with __getitem__ and __len__")
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise ValueError(f"data={data!r}: give a torch Dataset, or the DataLoader of one")
    if not isinstance(data, DataLoader):
        return TorchData(dataset)
    sampler, count = data.sampler, len(dataset)
    plain = type(sampler) is SequentialSampler or (
        type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == count
    )
    if not plain or type(data.batch_sampler) is not BatchSampler:
        raise ValueError("the DataLoader chooses its batches itself: give its data set, or a Subset of it")
    if batch_size is not None:
        of_recipe = {"batch_size": batch_size, "shuffle": True, "drop_last": False}
        shuffled = type(sampler) is RandomSampler
        of_loader = {"batch_size": data.batch_size, "shuffle": shuffled, "drop_last": data.drop_last}
        if other := [f"{name}={x}" for name, x in of_loader.items() if x != of_recipe[name]]:
            warnings.warn(f"of the DataLoader {', '.join(other)} is not used: {of_recipe}", stacklevel=3)
    return TorchData(dataset, data.collate_fn, data.num_workers, data.worker_init_fn)


def normalisation_of(dataset: Any) -> Normalisation | None:
    """How the images of a torch `Dataset` are normalised, by its attribute `normalisation`, else by the one
    `Normalize` in its `transform`; None where neither says it."""
    if (stated := getattr(dataset, "normalisation", None)) is not None:
        return stated
    if isinstance(dataset, Subset):
        return normalisation_of(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        parts = {normalisation_of(part) for part in dataset.datasets}
        if len(parts - {None}) > 1:
            raise ValueError(f"the parts of this ConcatDataset are normalised differently: {parts}")
        return parts.pop() if len(parts) == 1 else None
    transform = getattr(dataset, "transform", None)
    one_by_one = transform if isinstance(transform, nn.Sequential) else [transform]
    steps = getattr(transform, "transforms", one_by_one)
    normalise = [step for step in steps if isinstance(step, (transforms.Normalize, v2.Normalize))]
    if len(normalise) != 1:
        return None
    mean_std = []
    for value in (normalise[0].mean, normalise[0].std):
        # of a tensor in float32 the shortest decimal that it stands for, as it was written
        numbers = [float(str(number)) for number in np.asarray(value).flatten()]
        mean_std.append(numbers[0] if len(numbers) == 1 else numbers)
    return Normalisation(*mean_std)
