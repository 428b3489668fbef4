"""Images with labels in memory."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler

from atlib.data.loading import as_is
from atlib.data.rng import augmentation_seeds, draw_below
from atlib.data.sampler import Batch, ShardSpec, my_batches, my_repeats
from atlib.pair import Normalisation

# The target of an image whose class is not known: PyTorch's cross-entropy passes over it too.
UNLABELLED = -100


# (uint8 images (B, C, height, width), what is drawn for each: the seeds, int64 (B,)) -> other such images, or
# several views of each, (B, views, C, height, width)
Augment = Callable[[Tensor, Tensor], Tensor]


class Images(Dataset):
    """Images in memory with their targets. `images[i]` is one (image, target), `images.take([...])` a batch
    of them.

    pixels: uint8 (n, 3, height, width), or (n, 2, 3, height, width) with what the teacher sees second
    (`pair`). targets: a tensor whose first axis is n (class indices, or what a pre-text task regresses). An
    image comes out as float32, centred and scaled: (pixel / 255 - mean) / std, with one number each for all
    channels or one a channel. `augment` changes the images that `epoch` hands out, by a seed of their own
    (both of a pair by the same), and no others. Batches are made, and are, where the pixels are (`to`).
    """

    corrupt: Mapping[int, str] = {}  # pixels in memory are decoded already

    def __init__(
        self,
        pixels: Tensor,
        targets: Tensor,
        classes: Sequence[str] = (),
        mean: float | tuple[float, ...] = 0.5,
        std: float | tuple[float, ...] = 0.25,
        augment: Augment | None = None,
    ):
        if len(pixels) != len(targets):
            raise ValueError(f"{len(pixels)} images, but {len(targets)} targets")
        if pixels.dtype != torch.uint8 or pixels.ndim not in (4, 5):
            raise ValueError(
                f"pixels must be uint8 (n, 3, height, width), got {pixels.dtype} {tuple(pixels.shape)}"
            )
        self.pixels, self.targets, self.classes = pixels, targets, tuple(classes)
        self.mean, self.std, self.augment = mean, std, augment

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        images, targets = self.take([index])
        return images[0], targets[0]

    def take(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The batch at `indices` as evaluation sees it: float32 (B, 3, height, width) and its targets."""
        index = torch.as_tensor(indices)
        return self._scaled(self.pixels[index]), self.targets[index]

    __getitems__ = (
        take  # a DataLoader then fetches a batch in one call, a hundred times faster than image by image
    )

    def loader(self, batch_size: int, *, seed: int | None = None) -> DataLoader:
        """A DataLoader of (images, targets) as evaluation sees them: in order without a seed, shuffled anew
        each epoch with one. Every image once."""
        # Both generators are its own: evaluating in the middle of a training run shall not change the run.
        sampler = None
        if seed is not None:
            sampler = RandomSampler(self, generator=torch.Generator().manual_seed(seed))
        return DataLoader(
            self, batch_size=batch_size, sampler=sampler, collate_fn=as_is, generator=torch.Generator()
        )

    def epoch(self, part: ShardSpec, workers: int = 0) -> Iterator[Batch]:
        """One process's batches of one epoch, augmented. They are in memory: `workers` are not needed, and
        not started."""
        shares, device = zip(my_batches(len(self), part), my_repeats(len(self), part)), self.pixels.device
        for (indices, weight), repeats in shares:
            index = torch.as_tensor(indices, device=device)
            pixels = self.pixels[index]
            if self.augment is not None:
                seeds = augmentation_seeds(part, index, torch.as_tensor(repeats, device=device))
                # a pair as one image of six channels, so that both are cut and turned alike
                made = self.augment(pixels.flatten(1, -3), seeds)
                views = made.ndim == 5  # of single images, which are not put back into pairs
                pixels = made if views else made.reshape(*pixels.shape[:-2], *made.shape[-2:])
            yield Batch(self._scaled(pixels), self.targets[index], indices, weight)

    @property
    def normalisation(self) -> Normalisation:
        """How the images come out: mean and standard deviation of each channel."""
        return Normalisation(self.mean, self.std)

    def _scaled(self, pixels: Tensor) -> Tensor:
        mean, std = (
            torch.as_tensor(value, device=pixels.device).reshape(-1, 1, 1) for value in (self.mean, self.std)
        )
        # A tensor: a GPU divides by a number through its inverse, which rounds otherwise, and then an image
        # is not the one whose maps are stored (`MapCache`).
        highest = torch.tensor(255.0, device=pixels.device)
        return (pixels.float() / highest - mean) / std

    def to(self, device: torch.device | str) -> "Images":
        """The same images on a device, where training then takes and augments them. Those to be evaluated
        stay on the CPU, where labels are compared."""
        return Images(
            self.pixels.to(device), self.targets.to(device), self.classes, self.mean, self.std, self.augment
        )

    def with_augment(self, augment: Augment | None) -> "Images":
        """The same images with another augmentation."""
        return Images(self.pixels, self.targets, self.classes, self.mean, self.std, augment)

    def scaled_by(self, mean: float | tuple[float, ...], std: float | tuple[float, ...]) -> "Images":
        """The same images, centred and scaled otherwise."""
        return Images(self.pixels, self.targets, self.classes, mean, std, self.augment)

    def with_pixels(self, pixels: Tensor) -> "Images":
        """Other pixels, uint8 (n, 3, height, width), under the same targets and the same treatment."""
        return Images(pixels, self.targets, self.classes, self.mean, self.std, self.augment)

    def select(self, indices: Sequence[int]) -> "Images":
        """The images at `indices`, in that order, under the same treatment."""
        index = torch.as_tensor(indices, dtype=torch.long)
        return Images(
            self.pixels[index], self.targets[index], self.classes, self.mean, self.std, self.augment
        )


def pair(images: Images, teacher_images: Images) -> Images:
    """The same images for the student, and for its teacher others: `teacher_images[i]` beside `images[i]`.

    Everything that trains and evaluates an `AttentionTransfer` takes them; labels and treatment are those of
    `images`. With `generate(..., twin=...)`, what the two have in common is all that maps can tell the
    student. Raises `ValueError` for another number or shape of images, and for another scaling.
    """
    if images.pixels.shape != teacher_images.pixels.shape or images.pixels.ndim != 4:
        shapes = f"{tuple(images.pixels.shape)} and {tuple(teacher_images.pixels.shape)}"
        raise ValueError(f"both must be (n, 3, height, width) of one shape, got {shapes}")
    _check_scaling(images, teacher_images)
    return images.with_pixels(torch.stack([images.pixels, teacher_images.pixels], dim=1))


def with_unlabelled(images: Images, more: Images) -> Images:
    """`images`, and after them those of `more` with their labels taken away (`UNLABELLED`): a task's loss
    leaves them out, and what a teacher says of them is learned.

    Classes and treatment are those of `images`. Raises `ValueError` for images of another shape or scaling,
    and for targets that are not class indices.
    """
    if images.pixels.shape[1:] != more.pixels.shape[1:]:
        shapes = f"{tuple(images.pixels.shape[1:])} and {tuple(more.pixels.shape[1:])}"
        raise ValueError(f"images must be of one shape, got {shapes}: load both with the same image_size=")
    _check_scaling(images, more)
    if images.targets.ndim != 1 or images.targets.is_floating_point():
        raise ValueError(
            f"labels are class indices (n,), got targets {images.targets.dtype} {tuple(images.targets.shape)}"
        )
    pixels = torch.cat([images.pixels, more.pixels])
    targets = torch.cat([images.targets, images.targets.new_full((len(more),), UNLABELLED)])
    return Images(pixels, targets, images.classes, images.mean, images.std, images.augment)


def _check_scaling(images: Images, others: Images) -> None:
    if (images.mean, images.std) != (others.mean, others.std):
        scalings = f"{(images.mean, images.std)} and {(others.mean, others.std)}"
        raise ValueError(f"images are scaled by mean and std {scalings}: load both with the same")


def other_of_class(images: Images, same: bool, seed: int) -> Images:
    """For each image another one of `images`, drawn by `seed`, of the same class or of a different one: what
    a teacher may look at in place of a photograph, whose scene cannot be drawn again (`pair`). Labels are
    those of the images drawn.

    Raises `ValueError` for a class with a single image, or images of a single class.
    """
    classes, rng = np.asarray(images.targets), np.random.default_rng(seed)
    chosen = np.empty(len(classes), dtype=np.int64)
    for label in np.unique(classes):
        own = np.flatnonzero(classes == label)
        others = np.flatnonzero(classes != label)
        if len(own if same else others) < 1 + same:
            raise ValueError(
                f"class {label} has {len(own)} of {len(classes)} images: there is no other image of"
                f" {'the same' if same else 'another'} class"
            )
        # the same class: on by 1 to n - 1 places, so never the image itself
        step = rng.integers(1, len(own), len(own)) if same else None
        chosen[own] = own[(np.arange(len(own)) + step) % len(own)] if same else rng.choice(others, len(own))
    return images.select(chosen.tolist())


def crop_and_flip(padding: int = 4) -> Augment:
    """The usual CIFAR augmentation: reflect-pad, random crop back to size, random horizontal flip.

    What it returns raises `ValueError` for images that are not larger than the padding: they cannot be
    reflected so far.
    """

    def augment(images: Tensor, seeds: Tensor) -> Tensor:
        height, width = images.shape[-2:]
        if padding >= min(height, width):
            raise ValueError(
                f"padding={padding} reflects more than images of {height} x {width} pixels have: take at most"
                f" {min(height, width) - 1}"
            )
        # instead of padding and cutting, every pixel is fetched from where it would have been: (B, side)
        rows, columns = (
            _reflected(draw_below(seeds, number, 2 * padding + 1) - padding, side)
            for number, side in enumerate((height, width))
        )
        flipped = draw_below(seeds, 2, 2).bool()
        columns = torch.where(flipped[:, None], columns.flip(1), columns)
        cut = images.gather(2, rows[:, None, :, None].expand(images.shape))
        return cut.gather(3, columns[:, None, None, :].expand(images.shape))

    return augment


def _reflected(first: Tensor, side: int) -> Tensor:
    """Which of `side` pixels lie in the windows that begin at `first` (B,), where the image goes on beyond
    its edges as its mirror image does: (B, side)."""
    places = first[:, None] + torch.arange(side, device=first.device)
    return side - 1 - (side - 1 - places.abs()).abs()


def draw(count: int, size: int | None, seed: int, what: str) -> Sequence[int]:
    """Which `size` of `count` images: a random choice by `seed`, or all in order (None). Raises `ValueError`
    when there are too few."""
    if count == 0:
        raise ValueError(f"{what} has no images")
    if size is None:
        return range(count)
    if not 1 <= size <= count:
        raise ValueError(f"{what} has {count} images, {size} were asked for")
    return np.random.default_rng([seed, 1]).permutation(count)[:size]
