"""A student with its teacher, and how the student's images become those that the teacher was trained on."""

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from atlib._util import as_plain

# --- What a model was trained to see ---

LARGEST = 10.0  # of a mean or a deviation of pixels in 0..1: larger ones are of pixels in 0..255


@dataclass(frozen=True)
class Normalisation:
    """How images are centred and scaled: (pixel - mean) / std in each channel, for pixels in 0..1; a single
    number counts for three channels. A model says its own in its `pretrained_cfg`, as timm's do."""

    mean: Sequence[float]
    std: Sequence[float]

    def __post_init__(self):
        for name in ("mean", "std"):
            value = getattr(self, name)
            try:
                values = tuple(map(float, value if isinstance(value, Sequence) else (value,) * 3))
            except TypeError:  # of a stranger's file
                values = ()
            if not values or not all(map(math.isfinite, values)) or name == "std" and min(values) <= 0:
                raise ValueError(f"{name}={value!r}: finite numbers, one a channel; std above 0")
            if max(map(abs, values)) > LARGEST:
                in_0_to_1 = ", ".join(f"{value / 255:.3f}" for value in values)
                raise ValueError(f"{name}={value!r}: for pixels in 0..1 it is {in_0_to_1}")
            object.__setattr__(self, name, values)
        if len(self.mean) != len(self.std):
            raise ValueError(f"mean={self.mean} and std={self.std}: both have one number a channel")

    def __str__(self) -> str:
        mean, std = (" ".join(f"{value:.3g}" for value in values) for values in (self.mean, self.std))
        return f"mean {mean}, std {std}"

    @classmethod
    def of(cls, model: nn.Module) -> "Normalisation | None":
        """How images are normalised for a model; None where it does not say, or says it for other channels
        than it takes."""
        config = config_of(model)
        if config.get("mean") is None or config.get("std") is None:
            return None
        normalisation = cls(config["mean"], config["std"])
        # timm's models of one channel, or of five, have the configuration of those of three
        return normalisation if channels_of(model) in (None, len(normalisation.mean)) else None

    @classmethod
    def read(cls, described: Mapping[str, Any] | None) -> "Normalisation | None":
        """What `describe` wrote, also after JSON. Raises `ValueError` for anything else."""
        return None if described is None else cls(described.get("mean"), described.get("std"))

    def describe(self) -> dict[str, list[float]]:
        """Mean and standard deviation as plain JSON values."""
        return as_plain(self)


IMAGENET = Normalisation(IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)


def config_of(model: nn.Module) -> dict[str, Any]:
    """What timm notes on its models, `pretrained_cfg`, as a dict of its own; {} for others."""
    config = getattr(model, "pretrained_cfg", None) or {}
    return dict(config) if isinstance(config, Mapping) else config.to_dict()


def attach(model: nn.Module, normalisation: Normalisation | None) -> None:
    """Let a model say how images are normalised for it; None: it does not say."""
    # without both keys, and not None in them, timm takes its defaults
    config = {name: value for name, value in config_of(model).items() if name not in ("mean", "std")}
    model.pretrained_cfg = config if normalisation is None else config | vars(normalisation)


def renormalised(images: Tensor, now: Normalisation | None, then: Normalisation | None) -> Tensor:
    """Images (B, C, height, width), normalised as `now` says, as `then` says; the same tensor where both are
    equal or one is not known."""
    if now is None or then is None or now == then:
        return images
    if len({images.shape[1], len(now.mean), len(then.mean)}) > 1:  # one number would do for all channels
        raise ValueError(f"images of {images.shape[1]} channels, with {now} and {then}")
    parts = torch.tensor([now.mean, now.std, then.mean, then.std], dtype=torch.float64)[..., None, None]
    mean, std, mean_then, std_then = parts
    exact = torch.promote_types(images.dtype, torch.float32)
    scale, shift = std / std_then, (mean - mean_then) / std_then
    return (images * scale.to(images.device, exact) + shift.to(images.device, exact)).to(images.dtype)


def check_images(model: nn.Module, images: Tensor) -> None:
    """Raise `ValueError` unless images are floats (B, channels, height, width) that a ViT takes."""
    channels, size = channels_of(model), image_size_of(model)
    shaped = images.ndim == 4 and channels in (None, images.shape[1]) and size in (None, images.shape[2:])
    if not (shaped and images.is_floating_point()):
        needed = f"{channels or 'its'} channels" + (f", {size[0]} x {size[1]}" if size else "")
        raise ValueError(f"images {tuple(images.shape)} of {images.dtype}: batches of floats, {needed}")


def channels_of(model: nn.Module) -> int | None:
    """How many channels images have for a model; None where it does not say."""
    embed = getattr(model, "patch_embed", None)
    # the first convolution sees the image: of timm's hybrids, that of the network in front of the patches
    parts = () if embed is None else embed.modules()
    return next((part.in_channels for part in parts if isinstance(part, nn.Conv2d)), None)


def image_size_of(model: nn.Module) -> tuple[int, int] | None:
    """Height and width of the only images that a model takes; None for any, and where it does not say."""
    embed = getattr(model, "patch_embed", None)
    size = getattr(embed, "img_size", None)
    return tuple(size) if size is not None and getattr(embed, "strict_img_size", True) else None


def usual_image_size(model: nn.Module) -> tuple[int, int] | None:
    """Height and width of the images that a model was built for; None where it does not say."""
    config = getattr(model, "config", None)
    for size in (
        getattr(getattr(model, "patch_embed", None), "img_size", None),
        (config_of(model).get("input_size") or (None,))[1:] or None,
        getattr(config, "image_size", None),
        getattr(getattr(config, "vision_config", None), "image_size", None),
        getattr(model, "image_size", None),
        getattr(model, "img_size", None),
    ):
        size = (size, size) if isinstance(size, int) else size
        if size is not None and None not in size:
            return tuple(size)
    return None


# --- The two together ---


class View(NamedTuple):
    """What a teacher sees of the images of a pair."""

    normalisation: Normalisation | None  #: What it was trained on; None: not known, the images stay.
    size: tuple[int, int] | None  #: Its image size; None for any, and where it is the student's too.

    @classmethod
    def of(cls, teacher: nn.Module, student: nn.Module | None = None) -> "View":
        """What a teacher sees; beside a student, which says what images there are."""
        size = image_size_of(teacher)
        same = student is not None and size == image_size_of(student)
        return cls(Normalisation.of(teacher), None if same else size)

    def show(self, images: Tensor, normalisation: Normalisation | None) -> Tensor:
        """Images (B, 3, height, width), normalised as said, as the teacher was trained to see them."""
        if self.size is not None and tuple(images.shape[-2:]) != self.size:
            # torch resizes no half precision on a CPU
            wide = images if images.dtype == torch.float64 else images.float()
            resized = nn.functional.interpolate(wide, self.size, mode="bicubic", antialias=True)
            images = resized.to(images.dtype)
        return renormalised(images, normalisation, self.normalisation)


class Pair(nn.Module, ABC):
    """A student, which is trained, with the teachers that it learns from.

    Only the student is part of the module: `parameters()`, `state_dict()`, `train()` and DDP never see a
    teacher. A pair runs teachers in eval mode and without gradients, and moves them with `.to(...)`. A
    teacher gets the student's images, normalised anew and resized where it says its own normalisation and
    size. normalisation: of the images that the pair is given; None: ImageNet's, with a warning where a
    teacher's is another.
    """

    not_walkable = "it is a teacher and a student: walk its .student or its .teacher"

    def __init__(self, student: nn.Module, *teachers: nn.Module, normalisation: Normalisation | None = None):
        super().__init__()
        if any(teacher is student for teacher in teachers):
            raise ValueError("teacher and student are the same object: build a second ViT")
        if any(inside(teacher) == "module" for teacher in teachers):
            raise ValueError("a wrapped teacher hides how its images are normalised: give teacher.module")
        self.normalisation = stated(normalisation, teachers)
        self.assumed = normalisation is None and self.normalisation is not None  # it was not given
        #: What each teacher sees of the images.
        self.views = tuple(View.of(teacher, student) for teacher in teachers)
        self.student = student
        #: All teachers. A tuple keeps them out of nn.Module's registration: they are no parts.
        self.teachers = teachers

    @property
    def teacher(self) -> nn.Module:
        """The first teacher: the model that was passed in."""
        return self.teachers[0]

    @contextmanager
    def frozen_teachers(self) -> Iterator[None]:
        """Within it the teachers are in eval mode, and nothing keeps a graph."""
        training = [part for teacher in self.teachers for part in teacher.modules() if part.training]
        for part in training:
            vars(part)["training"] = False  # nn.Module's own way of setting it takes ten times as long
        try:
            # torch.compile cannot trace inference mode on parameters
            with torch.no_grad() if torch.compiler.is_compiling() else torch.inference_mode():
                yield
        finally:
            for part in training:
                vars(part)["training"] = True

    def for_teacher(self, images: Tensor) -> Tensor:
        """Images (B, 3, height, width) of the student as the first teacher was trained to see them."""
        if not images.is_floating_point():  # words
            return images
        shown = self.views[0].show(images, self.normalisation)
        dtypes = (weight.dtype for weight in self.teacher.parameters() if weight.is_floating_point())
        return shown.to(next(dtypes, shown.dtype))

    @property
    @abstractmethod
    def needs_teacher(self) -> bool:
        """Whether the student works at inference only together with what came from its teacher."""

    def _apply(self, fn, recurse=True):
        # .to(device), .double(), .cuda() reach the teachers although they are not registered
        for teacher in self.teachers:
            teacher._apply(fn, recurse)
        return super()._apply(fn, recurse)


def stated(normalisation: Normalisation | None, teachers: Sequence[nn.Module]) -> Normalisation | None:
    """The normalisation of the images that a pair is given: as it was said, else ImageNet's; None where no
    teacher asks for it."""
    if not isinstance(normalisation, Normalisation | None):
        raise ValueError(f"normalisation={normalisation!r}: give a Normalisation(mean, std)")
    if normalisation is not None:
        return normalisation
    of_teachers = [of_teacher for of_teacher in map(Normalisation.of, teachers) if of_teacher is not None]
    if others := [of_teacher for of_teacher in of_teachers if of_teacher != IMAGENET]:
        warnings.warn(
            f"the teacher's images have {others[0]}, the pair's are taken as ImageNet's: say normalisation=",
            stacklevel=4,
        )
    return IMAGENET if of_teachers else None


def check_normalisation(model: nn.Module, images: object) -> None:
    """Raise `ValueError` where images say that they are normalised in another way than a pair was told; warn
    where neither says it and the teacher needs to know, and where the model says another."""
    of_images, of_model = getattr(images, "normalisation", None), Normalisation.of(unwrapped(model))
    if None not in (of_images, of_model) and of_images != of_model:
        warnings.warn(f"the model is for images of {of_model}, and these have {of_images}", stacklevel=4)
    for part in model.modules():
        of_pair = part.normalisation if isinstance(part, Pair) else None
        if None not in (of_images, of_pair) and of_images != of_pair:
            raise ValueError(
                f"the images have {of_images}, the pair was built with normalisation= of {of_pair}"
            )
        if of_images is None and isinstance(part, Pair) and part.assumed:
            warnings.warn(
                "images taken to be normalised as ImageNet's: give the pair normalisation=", stacklevel=3
            )


def inside(model: nn.Module) -> str | None:
    """The attribute with the model that DataParallel, DDP or torch.compile wraps."""
    if isinstance(model, (nn.DataParallel, DistributedDataParallel)):
        return "module"
    return "_orig_mod" if "_orig_mod" in model._modules else None


def unwrapped(model: nn.Module) -> nn.Module:
    """A model without what DataParallel, DDP and torch.compile put around it."""
    inner = inside(model)
    return model if inner is None else unwrapped(getattr(model, inner))


def student_of(model: nn.Module) -> nn.Module:
    """What is trained to classify: the student of a pair; any other model is its own."""
    return model.student if isinstance(model, Pair) else model
