"""Several views of one image, as the published code of MoCo-v3 (arXiv 2104.02057, main_moco.py) and of DINO
(arXiv 2104.14294, main_dino.py) makes them: BYOL's (arXiv 2006.07733)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import NamedTuple

import torch
from PIL import Image, ImageFilter, ImageOps
from timm.data.transforms import str_to_interp_mode
from torch import Tensor
from torchvision import transforms

from atlib.data import Augment
from atlib.loading import draw_below, rng_put_back, seed_generators, splitmix64
from atlib.pair import Normalisation
from atrun.data.transforms import Augmentation

# Of brightness, contrast, saturation and hue; and with which probability an image gets it, or turns grey.
JITTER = (0.4, 0.4, 0.2, 0.1)
JITTERED, GREYED = 0.8, 0.2
SIGMA = (0.1, 2.0)  # of the blur, in pixels


class Look(NamedTuple):
    """How one view is made, beside its flip and its colours, which all have."""

    scale: tuple[float, float]  #: the least and the largest share of the image's area that is cropped
    blur: float  #: probability of a Gaussian blur; images in memory, which are small, are not blurred
    solarise: float = 0.0  #: probability that what is bright turns dark


def looks(
    scale: tuple[float, float], local: int = 0, local_scale: tuple[float, float] = (0.05, 0.4)
) -> tuple[Look, ...]:
    """The published views of an image: two, and `local` smaller parts of it (DINO's multi-crop)."""
    large = Look(scale, blur=1.0), Look(scale, blur=0.1, solarise=0.2)
    return large + (Look(local_scale, blur=0.5),) * local


@dataclass(frozen=True)
class Views:
    """How a photograph becomes several views, in the place of an `Augmentation`, of which size,
    interpolation, flip, mean and std are taken; batches are (B, views, 3, image_size, image_size)."""

    augmentation: Augmentation
    looks: Sequence[Look]

    def train(self, image: Image.Image, seed: int) -> Tensor:
        """The image's views, float32 (views, 3, image_size, image_size), as `Augmentation.train`."""
        views = []
        with rng_put_back():
            for number, look in enumerate(self.looks):
                seed_generators([seed, number])
                views.append(_of_photograph(self.augmentation, look)(image.convert("RGB")))
        return torch.stack(views)

    def evaluate(self, image: Image.Image) -> Tensor:
        """The image as evaluation sees it, as often as there are views, in the same shape."""
        return torch.stack([self.augmentation.evaluate(image)] * len(self.looks))

    @property
    def normalisation(self) -> Normalisation:
        """How an image comes out."""
        return self.augmentation.normalisation


@lru_cache
def _of_photograph(a: Augmentation, look: Look) -> transforms.Compose:
    interpolation = str_to_interp_mode(a.interpolation)
    return transforms.Compose(
        [
            transforms.RandomResizedCrop(a.image_size, look.scale, interpolation=interpolation),
            transforms.RandomHorizontalFlip(a.flip),
            transforms.RandomApply([transforms.ColorJitter(*JITTER)], JITTERED),
            transforms.RandomGrayscale(GREYED),
            transforms.RandomApply([_blurred], look.blur),
            transforms.RandomApply([ImageOps.solarize], look.solarise),
            transforms.ToTensor(),
            transforms.Normalize(a.mean, a.std),
        ]
    )


def _blurred(image: Image.Image) -> Image.Image:
    """By Pillow, as the published code does, with a radius that is drawn."""
    return image.filter(ImageFilter.GaussianBlur(torch.empty(()).uniform_(*SIGMA).item()))


# --- Images in memory: the same for a batch of bytes, wherever it is ---


def small_views(
    looks: Sequence[Look], flip: float = 0.5, jitter: Sequence[float] = JITTER, grey: float = GREYED
) -> Augment:
    """Several views of images in memory, for `Images.with_augment`: uint8 (B, 3, height, width) to uint8
    (B, views, 3, height, width), of which each hangs on its image's seed and its own number alone.

    flip, grey: probabilities; jitter: of brightness, contrast, saturation and hue, with the published
    probability of 0.8. Departures, so that a batch is made at once: colours change in this order, not in one
    that is drawn; hue turns about the axis of greys, not in HSV; nothing is blurred.
    """

    def augment(images: Tensor, seeds: Tensor) -> Tensor:
        if images.shape[1] != 3:
            raise ValueError(f"views need 3 channels, got {tuple(images.shape)}: pairs have no views")
        levels, how = images.float() / 255, (flip, jitter, grey)
        views = [_seen(levels, splitmix64(seeds + i), look, *how) for i, look in enumerate(looks)]
        return (255 * torch.stack(views, 1)).round().to(torch.uint8)

    return augment


def _seen(
    images: Tensor, seeds: Tensor, look: Look, flip: float, jitter: Sequence[float], grey: float
) -> Tensor:
    """One view of each image, levels in [0, 1], (B, 3, height, width)."""
    drawn = count()  # the number of the next draw of an image's own stream

    def uniform(low: float = 0.0, high: float = 1.0) -> Tensor:
        shares = draw_below(seeds, next(drawn), 2**31).double() / 2**31
        return (low + (high - low) * shares).float()

    # the crop, as shares of the image's width and height
    area, aspect = uniform(*look.scale), uniform(math.log(3 / 4), math.log(4 / 3)).exp()
    width, height = ((area * aspect).sqrt().clamp(max=1), (area / aspect).sqrt().clamp(max=1))
    left, top = uniform() * (1 - width), uniform() * (1 - height)
    mirror = torch.where(uniform() < flip, -1.0, 1.0)
    zero = torch.zeros_like(area)
    # from the view's coordinates, -1 to 1, to the image's
    rows = [width * mirror, zero, 2 * left + width - 1], [zero, height, 2 * top + height - 1]
    affine = torch.stack([torch.stack(row, -1) for row in rows], 1)
    grid = torch.nn.functional.affine_grid(affine, list(images.shape), align_corners=False)
    view = torch.nn.functional.grid_sample(images, grid, padding_mode="border", align_corners=False)

    changed = uniform() < JITTERED
    brightness, contrast, saturation = (
        torch.where(changed, uniform(max(0.0, 1 - strength), 1 + strength), 1.0)[:, None, None, None]
        for strength in jitter[:3]
    )
    turn = torch.where(changed, uniform(-jitter[3], jitter[3]), 0.0)
    saturation = torch.where((uniform() < grey)[:, None, None, None], 0.0, saturation)
    view = (view * brightness).clamp(0, 1)
    middle = _grey(view).mean((2, 3), keepdim=True)
    view = (middle + contrast * (view - middle)).clamp(0, 1)
    luma = _grey(view)
    view = luma + saturation * (view - luma)
    view = torch.einsum("bij,bjhw->bihw", _turned(turn), view).clamp(0, 1)
    solarised = (uniform() < look.solarise)[:, None, None, None] & (view >= 128 / 255)
    return torch.where(solarised, 1 - view, view)


def _grey(images: Tensor) -> Tensor:
    """The luma of images, (B, 1, height, width)."""
    return (images * images.new_tensor([0.299, 0.587, 0.114])[:, None, None]).sum(1, keepdim=True)


def _turned(turns: Tensor) -> Tensor:
    """Rotations of RGB about the axis of greys by turns (B,): (B, 3, 3), by Rodrigues' formula."""
    angle = 2 * math.pi * turns[:, None, None]
    axis = turns.new_full((3,), 3**-0.5)
    across = torch.linalg.cross(axis.expand(3, 3), torch.eye(3, device=turns.device)).T
    along = axis[:, None] * axis
    return angle.cos() * torch.eye(3, device=turns.device) + angle.sin() * across + (1 - angle.cos()) * along
