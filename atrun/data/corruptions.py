"""The 15 common corruptions of ImageNet-C, at 5 severities, of any images: noise, blur, weather, digital."""

from dataclasses import replace

import numpy as np
import torch

from atlib._util import require_known
from atlib.data import Images
from atlib.loading import rng_put_back

# In the published order (Hendrycks & Dietterich 2019, section 4).
CORRUPTIONS = (
    *("gaussian_noise", "shot_noise", "impulse_noise"),
    *("defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
    *("snow", "frost", "fog", "brightness"),
    *("contrast", "elastic_transform", "pixelate", "jpeg_compression"),
)
SEVERITIES = (1, 2, 3, 4, 5)
# These two draw from a generator that takes its seed as an argument, the others from NumPy's global one.
_SEEDED = ("impulse_noise", "glass_blur")


def corrupt(images: Images, name: str, severity: int, seed: int = 0) -> Images:
    """The same images with one corruption: uint8 in, uint8 out, targets and treatment kept.

    name: one of `CORRUPTIONS`; severity: 1 to 5, with the same random numbers at each. Image i is corrupted
    in the same way whichever images come before it. The parameters are ImageNet-C's, for 224 x 224 pixels;
    CIFAR-10-C has milder ones. Source: Hendrycks & Dietterich 2019 (arXiv 1903.12261), section 4.
    """
    import imagecorruptions  # OpenCV and numba take seconds

    require_known("corruption", name, CORRUPTIONS)
    pixels = torch.empty_like(images.pixels)
    with rng_put_back():
        for index, image in enumerate(images.pixels.permute(0, 2, 3, 1).numpy()):
            drawn = int(np.random.SeedSequence([seed, index]).generate_state(1)[0])
            np.random.seed(drawn)
            seeded = {"seed": drawn} if name in _SEEDED else {}
            image = np.ascontiguousarray(image)
            changed = imagecorruptions.corrupt(image, severity=severity, corruption_name=name, **seeded)
            pixels[index] = torch.tensor(changed).permute(2, 0, 1)
    return replace(images, pixels=pixels)
