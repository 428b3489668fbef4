"""The 15 common corruptions of ImageNet-C, at 5 severities, of any images: noise, blur, weather, digital."""

import numpy as np
import torch

from atlib._util import require_known
from atlib.data import Images
from atlib.loading import rng_put_back

# The published groups, in the published order (Hendrycks & Dietterich 2019, section 4).
GROUPS = {
    "noise": ("gaussian_noise", "shot_noise", "impulse_noise"),
    "blur": ("defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
    "weather": ("snow", "frost", "fog", "brightness"),
    "digital": ("contrast", "elastic_transform", "pixelate", "jpeg_compression"),
}
CORRUPTIONS = tuple(name for names in GROUPS.values() for name in names)
SEVERITIES = (1, 2, 3, 4, 5)
SMALLEST = 32  # pixels; the library refuses smaller images

# These two draw from a generator of their own, which takes its seed as an argument; the others draw from
# NumPy's global one.
_SEEDED = ("impulse_noise", "glass_blur")


def corrupt(images: Images, name: str, severity: int, seed: int = 0) -> Images:
    """The same images with one corruption: uint8 in, uint8 out, targets and treatment kept.

    `name` is one of `CORRUPTIONS`, `severity` 1 to 5. Image i is corrupted in the same way whichever images
    come before it, and with the same random numbers at every severity. NumPy's global generator is left as it
    was found.

    The parameters are those of ImageNet-C, made for 224 x 224 pixels, as the package imagecorruptions-imaug
    has them: sizes are in pixels, so a blur weighs more on a smaller image. CIFAR-10-C was published with
    milder ones (the s.d. of its Gaussian noise is 0.04 to 0.10 where ImageNet-C's is 0.08 to 0.38;
    `make_cifar_c.py` of hendrycks/robustness), so accuracies on CIFAR-10 corrupted here are not comparable
    with those on CIFAR-10-C, whose images `load("owner/name")` reads from a copy on the hub. Motion blur and
    snow are blurred by the package's own routine where ImageNet-C used ImageMagick.

    Raises `ValueError` for an unknown name, another severity and images below 32 x 32 pixels, `ImportError`
    without the package. Source: Hendrycks & Dietterich 2019, "Benchmarking Neural Network Robustness to
    Common Corruptions and Perturbations" (arXiv 1903.12261), section 4.
    """
    require_known("corruption", name, CORRUPTIONS)
    if isinstance(severity, bool) or severity not in SEVERITIES:
        raise ValueError(f"severity must be one of {', '.join(map(str, SEVERITIES))}, got {severity!r}")
    channels, height, width = images.pixels.shape[1:]
    if channels != 3 or min(height, width) < SMALLEST:
        raise ValueError(
            f"corruptions need images of 3 channels and at least {SMALLEST} x {SMALLEST} pixels, got "
            f"({channels}, {height}, {width}): load them with image_size={SMALLEST} or more"
        )
    library = _library()
    pixels = torch.empty_like(images.pixels)
    with rng_put_back():
        for index, image in enumerate(images.pixels.permute(0, 2, 3, 1).numpy()):
            own = int(np.random.SeedSequence([seed, index]).generate_state(1)[0])
            np.random.seed(own)
            seeded = {"seed": own} if name in _SEEDED else {}
            changed = library.corrupt(
                np.ascontiguousarray(image), severity=int(severity), corruption_name=name, **seeded
            )
            pixels[index] = torch.tensor(changed).permute(2, 0, 1)
    return images.with_pixels(pixels)


def _library():
    try:
        # imported here: OpenCV and numba take seconds, and only this function needs them
        import imagecorruptions
    except ImportError as error:
        raise ImportError(
            f"the corruptions need the package imagecorruptions-imaug, which cannot be imported ({error}):"
            " pip install imagecorruptions-imaug. Where OpenCV misses libGL.so.1: apt-get install libgl1"
            " libglib2.0-0"
        ) from error
    return imagecorruptions
