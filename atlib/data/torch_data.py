"""Data of torch's own kind, a map-style `Dataset` or the `DataLoader` of one, as training and evaluation take
them."""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any

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

from atlib.data.loading import Made, Share, deliver, loader_of
from atlib.data.rng import augmentation_seeds, rng_put_back, seed_generators
from atlib.data.sampler import Batch, EvaluationData, ShardSpec, TrainingData, my_batches, my_repeats
from atlib.pair import Normalisation

# What a DataLoader is given: a list of items of its data set -> (images, targets)
Collate = Callable[[list], tuple[Tensor, Tensor]]
UNSCALED = 25.0  # a pixel that is normalised lies within some 5 of 0


class TorchData:
    """A torch `Dataset` of (image, label), in the order and the shares of this project.

    An image is a float32 tensor (3, height, width), all of one size, as the data set's transforms leave it; a
    label is a whole number, or a tensor, such as shares (classes,). collate: makes (images, targets) of a
    list of items, where they are of another form; None: images and labels are stacked. workers: processes
    that read. initialise: called with its number in each of them, before it reads.

    While an item is read, the global generators of Python, NumPy and torch (on the CPU) start from a seed of
    its own and are put back afterwards. So what random transforms draw hangs on run, pass and index, not on
    workers or processes, nor on where a run is taken up again; in an evaluation it hangs on the index alone.
    (For what a `collate` draws, that is so as long as a step's images are divided in the same way.)
    """

    corrupt: Mapping[int, str] = {}  # what cannot be read raises the data set's own error

    def __init__(
        self,
        dataset: Dataset,
        collate: Collate | None = None,
        workers: int = 0,
        initialise: Callable[[int], None] | None = None,
    ):
        self.dataset, self.collate, self.workers, self.initialise = dataset, collate, workers, initialise
        self.normalisation = normalisation_of(dataset)
        if len(self):
            images, _ = self.take([0])  # an item of another form is found out now
            if UNSCALED < (largest := images.abs().max().item()) < math.inf:
                warnings.warn(
                    f"an image of this {type(dataset).__name__} has values up to {largest:.0f}: a ViT expects"
                    " pixels of 0 to 1, normalised. Divide them by 255, as transforms.ToTensor does, then"
                    " transforms.Normalize(mean, std)",
                    stacklevel=2,
                )

    def __len__(self) -> int:
        return len(self.dataset)

    def take(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The batch at `indices`: float32 (B, 3, height, width) and its targets (B, ...). Raises `ValueError`
        for items of another form, and what the data set raises, with a note of the index."""
        made = self._make([(index, index) for index in indices])
        return made.images, made.targets

    def loader(self, batch_size: int) -> DataLoader:
        """A DataLoader of (images, targets) in order, every image once."""
        batches = BatchSampler(range(len(self)), batch_size, drop_last=False)
        return loader_of(self.take, batches, self.workers, initialise=self.initialise)

    def epoch(self, part: ShardSpec, workers: int = 0) -> Iterator[Batch]:
        """One process's batches of an epoch, read by `workers` processes ahead of time (0: by as many as this
        was made with)."""

        def seeds_of(indices: list[int], repeats: list[int]) -> list[int]:
            return augmentation_seeds(part, torch.tensor(indices), torch.tensor(repeats)).tolist()

        shares = (
            Share([*zip(indices, seeds_of(indices, repeats))], weight)
            for (indices, weight), repeats in zip(my_batches(len(self), part), my_repeats(len(self), part))
        )
        how = {"workers": workers or self.workers, "initialise": self.initialise}
        return deliver(self._make, shares, on_corrupt="raise", corrupt={}, **how)

    def _make(self, wanted: Sequence[tuple[int, int]]) -> Made:
        """The items at (index, seed of what their transforms draw); runs in a worker."""
        indices = [index for index, _ in wanted]
        with rng_put_back():  # once for all, since it takes longer than to read a small item
            items = [self._item(index, seed) for index, seed in wanted]
            if self.collate is not None:
                seed_generators([wanted[0][1], 1])  # another stream than its first item's
                return Made(*_collated(self.collate(items), len(items)), indices, {})
        pairs = [_image_and_label(item, index) for item, index in zip(items, indices)]
        images, targets = (torch.stack(part) for part in zip(*pairs))
        return Made(images, targets, indices, {})

    def _item(self, index: int, seed: int) -> Any:
        seed_generators(seed)
        try:
            return self.dataset[index]
        except Exception as error:
            error.add_note(f"while item {index} of this {type(self.dataset).__name__} was read")
            raise


def as_data(data: Any, batch_size: int | None = None) -> TrainingData | EvaluationData:
    """What training and evaluation take: data that have an `epoch`, or `loader` and `take`, as they are, and
    a torch `Dataset` or `DataLoader` as `TorchData`.

    Of a DataLoader its dataset, collate_fn, num_workers and worker_init_fn are used. Order and size of a
    batch are a recipe's, and every image comes once in a pass; batch_size: in a training that of the recipe,
    with which it is warned of what the loader has otherwise. Raises `ValueError` for data that are read as
    they come, for a loader that chooses its images by a sampler, and for items of another form.
    """
    # torchvision's ImageFolder has a `loader`, too, and data sets of `datasets` have a `take`
    if callable(getattr(data, "epoch", None)) or hasattr(data, "loader") and hasattr(data, "take"):
        return data
    dataset = data.dataset if isinstance(data, DataLoader) else data
    if isinstance(dataset, IterableDataset):
        raise ValueError(
            f"a {type(dataset).__name__} has no index: give a data set with __getitem__ and __len__"
        )
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise ValueError(
            f"data={data!r}: give a torch Dataset with __getitem__ and __len__, the DataLoader of one, or"
            " what atlib.data opens"
        )
    if not isinstance(data, DataLoader):
        return TorchData(dataset)
    _check_order(data)
    if batch_size is not None:
        _tell_replaced(data, batch_size)
    collate = None if data.collate_fn is default_collate else data.collate_fn
    return TorchData(dataset, collate, data.num_workers, data.worker_init_fn)


def normalisation_of(dataset: Any) -> Normalisation | None:
    """How the images of a torch `Dataset` are normalised: as its attribute `normalisation` says, else as the
    one `Normalize` among torchvision's transforms in its `transform`; None where neither says it.

    A `Subset` says what its data set does, and a `ConcatDataset` what all of its own do. Raises `ValueError`
    where these differ.
    """
    if (said := getattr(dataset, "normalisation", None)) is not None:
        return said
    if isinstance(dataset, Subset):
        return normalisation_of(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        parts = {normalisation_of(part) for part in dataset.datasets}
        if len(parts - {None}) > 1:
            several = "; ".join(sorted(map(str, parts - {None})))
            raise ValueError(f"the parts of this ConcatDataset are normalised differently: {several}")
        return parts.pop() if len(parts) == 1 else None
    transform = getattr(dataset, "transform", None)
    one_by_one = transform if isinstance(transform, nn.Sequential) else [transform]
    steps = getattr(transform, "transforms", one_by_one)
    normalise = [step for step in steps if isinstance(step, (transforms.Normalize, v2.Normalize))]
    if len(normalise) != 1:
        return None
    # of a tensor in float32 the shortest decimal that it stands for, as it was written
    mean, std = (
        [float(str(number)) for number in np.asarray(value).flatten()]
        for value in (normalise[0].mean, normalise[0].std)
    )
    return Normalisation(*(value[0] if len(value) == 1 else value for value in (mean, std)))


def _check_order(loader: DataLoader) -> None:
    """Raise `ValueError` for a loader whose batches are not its data set in order, or shuffled."""
    sampler, count = loader.sampler, len(loader.dataset)
    plain = type(sampler) is SequentialSampler or (
        type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == count
    )
    if plain and type(loader.batch_sampler) is BatchSampler:
        return
    if loader.batch_sampler is None:
        wrong = "batch_size=None, and so no batches of single items"
    elif type(loader.batch_sampler) is not BatchSampler:
        wrong = f"a batch_sampler of its own, {type(loader.batch_sampler).__name__}"
    else:
        wrong = f"a sampler of its own, {type(sampler).__name__}"
    raise ValueError(
        f"the DataLoader has {wrong}; train orders images itself: give it the data set, or a Subset"
    )


def _tell_replaced(loader: DataLoader, batch_size: int) -> None:
    replaced = []
    if loader.batch_size != batch_size:
        replaced.append(f"batch_size={loader.batch_size}: the recipe's is {batch_size}")
    if type(loader.sampler) is SequentialSampler:
        replaced.append("shuffle=False: images are shuffled anew in each pass")
    if loader.drop_last:
        replaced.append("drop_last=True: the last step of a pass has the images that are left")
    if replaced:
        warnings.warn(
            f"of the DataLoader this is not used: {'; '.join(replaced)}. Give train its data set alone, with"
            " workers=, and nothing is replaced",
            stacklevel=4,
        )


def _image_and_label(item: Any, index: int) -> tuple[Tensor, Tensor]:
    """An item as two tensors. Raises `ValueError` for one of another form."""
    image, label = item
    if not isinstance(image, Tensor) or image.dtype != torch.float32 or image.ndim not in (3, 4):
        found = f"{image.dtype} {tuple(image.shape)}" if isinstance(image, Tensor) else type(image).__name__
        raise ValueError(
            f"the image of item {index} is {found}: transforms must make float32 (3, height, width)"
        )
    if isinstance(label, Tensor):
        return image, label.long() if label.ndim == 0 and not label.is_floating_point() else label
    if isinstance(label, Integral):
        return image, torch.tensor(int(label))
    raise ValueError(f"the label of item {index} is {label!r}: give a whole number or a tensor")


def _collated(batch: Any, count: int) -> tuple[Tensor, Tensor]:
    """What a collate_fn made of so many items. Raises `ValueError` for another form."""
    if isinstance(batch, (tuple, list)) and len(batch) == 2 and all(isinstance(p, Tensor) for p in batch):
        images, targets = batch
        fits = images.dtype == torch.float32 and images.ndim in (4, 5)
        if fits and len(images) == len(targets) == count:
            return images, targets
        found = f"{images.dtype} {tuple(images.shape)} and targets {tuple(targets.shape)}"
    else:
        found = f"a {type(batch).__name__}"
    raise ValueError(
        f"the collate_fn made {found} of {count} items: give (images, targets), float32 (items,"
        f" 3, height, width)"
    )
