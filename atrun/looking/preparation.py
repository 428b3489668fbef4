"""One picture as a model takes it, and as a reader sees it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from timm.data import create_transform, resolve_model_data_config
from torch import Tensor, nn
from torchvision.transforms.functional import to_pil_image

from atlib.pair import Normalisation, usual_image_size
from atrun.data.decoding import as_rgb, large_pictures

SHOWN = 672  # pixels that the picture's longer side has on the page at most, where the original has so many


class Preparation(NamedTuple):
    """How a picture becomes a model's input, by timm's evaluation transform."""

    size: tuple[int, int]  #: Pixels, (height, width).
    mean: tuple[float, ...]  #: Per channel, of pixels in 0..1.
    std: tuple[float, ...]
    crop_pct: float = 1.0  #: The picture is resized to size / crop_pct, and its middle is taken.
    #: "center" keeps the aspect and cuts off what is longer, "squash" does not keep it, "border" pads.
    crop_mode: str = "center"
    interpolation: str = "bicubic"
    source: str = "as the caller asked"  #: What says so, as a sentence of the page.

    def describe(self) -> str:
        """All of it in a sentence."""
        height, width = self.size
        larger = " x ".join(str(int(side / self.crop_pct)) for side in self.size)
        how = {"squash": "squeezed or stretched to", "border": "resized to fit into, and padded to,"}
        mean, std = (", ".join(f"{value:.4g}" for value in values) for values in (self.mean, self.std))
        return (
            f"The picture is {how.get(self.crop_mode, 'resized to cover')} {larger} pixels"
            f" ({self.interpolation}), and the middle {height} x {width} are taken; mean {mean}, standard"
            f" deviation {std} of the channels ({self.source})."
        )


class Prepared(NamedTuple):
    """A picture in both forms."""

    pixels: Tensor  #: What the model takes: float32 (1, 3, height, width), normalised.
    photograph: Image.Image  #: The same part of the picture for the eye, finer where the original is.


def preparation_of(vit: nn.Module, **changes: Any) -> Preparation:
    """How timm prepares pictures for a model of this size, as `source` says, with `changes` to the fields."""
    size = changes.pop("size", None) or usual_image_size(vit)
    settings = resolve_model_data_config(vit, args={} if size is None else {"input_size": (3, *size)})
    names = ("mean", "std", "crop_pct", "crop_mode", "interpolation")
    source = (
        "its own configuration in timm"
        if Normalisation.of(vit) is not None
        else "it does not say how, so this is timm's default, with ImageNet's mean and deviation"
    )
    size, how = tuple(settings["input_size"][1:]), {name: settings[name] for name in names}
    preparation = Preparation(size, **how, source=source)
    if changes and "source" not in changes:
        changes["source"] = f"{', '.join(changes)} as the caller asked, the rest: {source}"
    return preparation._replace(**changes)


def prepare(image: str | Path | Image.Image | Tensor, preparation: Preparation) -> Prepared:
    """A picture prepared for a model: a file, a PIL image, or uint8 pixels (3, height, width)."""
    # timm would take the middle of what is smaller than it, or of an unknown mode
    if not 0 < preparation.crop_pct <= 1 or preparation.crop_mode not in ("center", "squash", "border"):
        raise ValueError(f"crop_pct={preparation.crop_pct}, crop_mode={preparation.crop_mode!r}")
    opened = open_picture(image)
    (height, width), longer = preparation.size, max(preparation.size)
    settings: Mapping = {name: getattr(preparation, name) for name in ("crop_mode", "interpolation")}

    def transform(factor: int, crop_pct: float, **more):
        return create_transform((3, factor * height, factor * width), crop_pct=crop_pct, **settings, **more)

    pixels = transform(1, preparation.crop_pct, mean=preparation.mean, std=preparation.std)(opened)
    # Finer by a whole factor, and the same part of the picture: timm rounds the size that it resizes to.
    exact = longer / int(longer / preparation.crop_pct)
    factor = max(1, min(SHOWN // longer, int(min(opened.size) * exact) // min(preparation.size)))
    seen = transform(factor, exact if factor > 1 else preparation.crop_pct, use_prefetcher=True)(opened)
    return Prepared(pixels.unsqueeze(0), to_pil_image(torch.as_tensor(seen)))


def open_picture(image: str | Path | Image.Image | Tensor) -> Image.Image:
    """A picture in RGB of 8 bits, turned as the camera says."""
    if isinstance(image, Tensor):
        if image.ndim != 3 or image.shape[0] != 3 or image.dtype != torch.uint8:
            raise ValueError(f"pixels are uint8 (3, height, width), got {image.dtype} {tuple(image.shape)}")
        return to_pil_image(image)
    if isinstance(image, Image.Image):
        return as_rgb(image)
    try:
        with large_pictures(), Image.open(image) as opened:
            return as_rgb(opened)
    # Pillow's own message names the file only where it is missing
    except (OSError, Image.DecompressionBombError) as error:
        raise OSError(f"{image} cannot be read as an image ({error})") from error
