"""What happens to a photograph on its way into a batch, as one frozen value; operations are timm's."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from PIL import Image, ImageOps
from timm.data import create_transform
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.data.transforms import str_to_interp_mode
from torch import Tensor
from torchvision import transforms

from atlib._util import as_plain, require_known
from atlib.data import Augment, cut_out
from atlib.loading import rng_put_back, seed_generators
from atlib.pair import Normalisation

AS_STORED = Normalisation(0.5, 0.25)  # as `atlib.data.Images` normalises


@dataclass(frozen=True)
class Augmentation:
    """How an image is cropped, changed and normalised, in training and for evaluation."""

    image_size: int = 224  #: pixels a side of the square that comes out
    #: in training: "random-resized" (a random share of the area at an aspect of 3/4 to 4/3; Szegedy et al.
    #: 2015), "padded" (shorter side to image_size, reflected pixels around, a random square: DeiT III's,
    #: arXiv 2204.07118, and CIFAR's) or "centre" (shorter side to image_size, the middle)
    crop: str = "random-resized"
    scale: tuple[float, float] = (0.08, 1.0)  #: least and largest share of the area, of "random-resized"
    padding: int = 4  #: reflected pixels on each side, of "padded"
    flip: float = 0.5  #: probability of a mirror image
    #: timm's string for RandAugment (Cubuk et al. 2020), "rand-m9-mstd0.5-inc1" is (9, 0.5); None for none
    rand_augment: str | None = None
    three_augment: bool = False  #: one of grey, solarised, blurred (DeiT III)
    color_jitter: float = 0.0  #: strength in brightness, contrast and saturation, 0 for none
    #: probability that a rectangle is filled with noise (Zhong et al. 2020), after normalising
    random_erasing: float = 0.0
    interpolation: str = "bicubic"  #: of every resizing
    #: evaluation resizes the shorter side to image_size / crop_pct and takes the middle
    crop_pct: float = 0.875
    mean: tuple[float, float, float] = IMAGENET_DEFAULT_MEAN  #: per channel, of pixels in 0..1
    std: tuple[float, float, float] = IMAGENET_DEFAULT_STD  #: likewise, the standard deviation

    def __post_init__(self):
        require_known("crop", self.crop, ("random-resized", "padded", "centre"))
        require_known("interpolation", self.interpolation, ("nearest", "bilinear", "bicubic", "lanczos"))
        Normalisation(self.mean, self.std)  # raises for what cannot be meant, such as numbers of 0..255
        shares = {"least": self.scale[0], "largest": self.scale[1], "crop_pct": self.crop_pct}
        shares |= {"flip": self.flip, "random_erasing": self.random_erasing}
        if not all(0 <= share <= 1 for share in shares.values()) or self.scale[0] > self.scale[1]:
            raise ValueError(f"shares and probabilities are from 0 to 1, the least first, got {shares}")
        if self.crop_pct == 0:  # timm would take 0.875
            raise ValueError("crop_pct=0: the middle that is taken is some of the image, 1 for all of it")
        if self.rand_augment is not None and not self.rand_augment.startswith("rand"):
            raise ValueError(f"rand_augment={self.rand_augment!r} is no string of timm's RandAugment")
        if self.rand_augment is not None and (self.three_augment or self.color_jitter):
            raise ValueError("rand_augment= changes colours: no three_augment=, color_jitter= beside it")
        for name in ("scale", "mean", "std"):  # JSON reads tuples back as lists, which cannot be hashed
            object.__setattr__(self, name, tuple(map(float, getattr(self, name))))

    def train(self, image: Image.Image, seed: int) -> Tensor:
        """The image augmented and normalised, float32 (3, image_size, image_size), by a seed from 0 on."""
        with rng_put_back():
            seed_generators(seed)
            return _training(self)(image.convert("RGB"))

    def evaluate(self, image: Image.Image) -> Tensor:
        """The image resized, its middle, normalised, float32 (3, image_size, image_size)."""
        return _evaluation(self)(image.convert("RGB"))

    @property
    def normalisation(self) -> Normalisation:
        """How an image comes out."""
        return Normalisation(self.mean, self.std)

    def describe(self) -> dict:
        """The augmentation as plain JSON values; `Augmentation(**description)` reads it, also after JSON."""
        return as_plain(self)


@lru_cache
def _training(a: Augmentation) -> transforms.Compose:
    # timm hands crop, colours and normalisation back apart, so another crop can take the place of the first
    # part.
    how = {"scale": a.scale, "hflip": a.flip, "interpolation": a.interpolation, "mean": a.mean, "std": a.std}
    how |= {"color_jitter": a.color_jitter or None, "re_prob": a.random_erasing, "re_mode": "pixel"}
    how |= {"auto_augment": "3a" if a.three_augment else a.rand_augment}
    crop, colours, normalise = create_transform(a.image_size, is_training=True, separate=True, **how)
    if a.crop != "random-resized":
        shorter = transforms.Resize(a.image_size, interpolation=str_to_interp_mode(a.interpolation))
        square = transforms.CenterCrop(a.image_size)
        if a.crop == "padded":
            square = transforms.RandomCrop(a.image_size, padding=a.padding, padding_mode="reflect")
        crop = transforms.Compose([shorter, square, transforms.RandomHorizontalFlip(a.flip)])
    for step in colours.transforms:
        for operation in getattr(step, "ops", ()):
            if operation.name.startswith("Posterize"):
                operation.aug_fn = _posterise
    return transforms.Compose([crop, colours, normalise])


def _posterise(image: Image.Image, bits: int, **unused) -> Image.Image:
    # At the end of its range timm posterises to 0 bits. Pillow refuses that since version 13; before, and so
    # in published runs, it made a black image.
    return ImageOps.posterize(image, bits) if bits > 0 else Image.new(image.mode, image.size)


@lru_cache
def _evaluation(a: Augmentation) -> transforms.Compose:
    how = {"interpolation": a.interpolation, "mean": a.mean, "std": a.std, "crop_pct": a.crop_pct}
    return create_transform(a.image_size, **how)


def in_two(a: Augmentation) -> tuple[Callable[[Image.Image], Image.Image], Augment] | None:
    """`Augmentation.train` as what is the same for an image in every pass, and what is drawn, for a batch of
    bytes wherever it is: the same pixels for the same seeds. None where more is drawn than a flip and where a
    square lies, as Pillow changes sizes and colours otherwise than a GPU does."""
    if a.crop == "random-resized" or any((a.rand_augment, a.three_augment, a.color_jitter, a.random_erasing)):
        return None
    crop, _, _ = _training(a).transforms
    shorter, square, _ = crop.transforms
    is_padded, size = a.crop == "padded", (a.image_size, a.image_size)
    padding = a.padding if is_padded else 0

    def augment(images: Tensor, seeds: Tensor) -> Tensor:
        room = [side + 2 * padding - a.image_size + 1 for side in images.shape[-2:]]
        room = [] if room == [1, 1] else room  # torchvision then draws no place
        drawn = []
        with rng_put_back():
            for seed in seeds.tolist():
                seed_generators(seed)
                place = [torch.randint(0, most, (1,)).item() for most in room]
                drawn.append([*(place or (0, 0)), torch.rand(1).item() < a.flip])
        top, left, mirrored = torch.tensor(drawn, device=images.device).T
        return cut_out(images, top - padding, left - padding, mirrored.bool(), size)

    return (shorter if is_padded else transforms.Compose([shorter, square])), augment
