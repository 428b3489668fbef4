"""On which images a student is right: those that only one of two other students has right, and those whose
partner's map can be read. Records of test images are enough, nothing is trained."""

from collections.abc import Mapping
from functools import cache

import numpy as np
import torch

from atbook.lab.other_images import other_of_class
from atbook.lab.verdicts import Estimate, Side, proportion
from atbook.records import read_records, results_folder
from atlib.data import Images
from atlib.loading import seed_for

Right = Mapping[int, np.ndarray]  # {seed: (images,)}, 1 where a student is right


def right_where(of: Right, only: Right, but: Right) -> Estimate:
    """How often students `of` are right on images where, in other seeds, `only` is right and `but` is wrong:
    the mean over seeds of `of`, of all pairs of other seeds together, with its 95 % interval over seeds."""
    shares = []
    for seed, right in of.items():
        right_there = sum(bits for other, bits in only.items() if other != seed)
        wrong_there = sum(1 - bits for other, bits in but.items() if other != seed)
        pairs = right_there * wrong_there
        shares.append([(pairs * right).sum() / pairs.sum()])
    return proportion(np.array(shares))


def overlap(scale: str, of: str, only: str, but: str, *studies: str) -> Estimate:
    """The same of recorded methods; studies: of the three, or one for all."""
    return right_where(*_of_methods(scale, (of, only, but), studies))


def right_by_partner(scale: str, read: bool, of: str, blind: str, study: str) -> Estimate:
    """How often students `of` are right on images whose partner of the same class, in other seeds, a student
    `blind` reads rightly (`read`) or wrongly off the partner's maps."""
    of_students, of_blind = _of_methods(scale, (of, blind), (study,))
    partners = partners_of(scale)
    at_partner = {seed: bits[partners] for seed, bits in of_blind.items()}
    wrong = {seed: 1 - bits for seed, bits in at_partner.items()}
    nothing = {seed: np.zeros_like(bits) for seed, bits in at_partner.items()}
    return right_where(of_students, at_partner if read else wrong, nothing)


@cache
def partners_of(scale: str) -> np.ndarray:
    """The place (images,) of each test image's partner of the same class, drawn once as the studies do."""
    digits = (results_folder() / "real" / f"{scale}.labels").read_text(encoding="ascii").strip()
    places = torch.arange(len(digits))
    bytes_of = torch.stack([places // 256, places % 256, 0 * places], 1).to(torch.uint8)
    images = Images(bytes_of[:, :, None, None], torch.tensor([int(digit) for digit in digits]))
    high, low, _ = other_of_class(images, True, seed_for(0, "twins")).pixels[:, :, 0, 0].long().T
    return (256 * high + low).numpy()


def _of_methods(scale: str, methods: tuple[str, ...], studies: tuple[str, ...]) -> list[Right]:
    studies = studies * len(methods) if len(studies) == 1 else studies
    return [
        Side(study, (method,)).values(read_records(study, scale))
        for method, study in zip(methods, studies, strict=True)
    ]
