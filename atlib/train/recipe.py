"""What a training run is made of, as frozen values; defaults are the built-in scale's."""

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

from atlib._util import check_fields, require_known
from atlib.data.sampler import steps_per_epoch

# Known to need nothing but a gradient, so that no recipe of the book has to try its own; the numbers that
# each keeps for a weight.
PLAIN = {"adamw": 2.0, "lamb": 2.0, "sgd": 1.0}
NEED_CUDA = ("bnb", "fused")  # so the names begin of those that timm takes from bitsandbytes and from APEX
# What stands for a value where a recipe is said in epochs, for data of any size.
IN_EPOCHS = {"steps": "epochs", "warmup": "warmup_epochs", "lr": "base_lr"}
_NOT_NEGATIVE = ("min_lr", "weight_decay", "task_weight", "transfer_weight", "mixup", "cutmix")
# The values that can be meant; NaN fails every comparison.
RULES = (
    (("lr", "clip", *_NOT_NEGATIVE), lambda value: value != math.inf, "must be a finite number"),
    (("lr",), lambda value: value > 0, "must be above 0"),
    (("epochs", "base_lr"), lambda value: value is None or 0 < value < math.inf, "must be finite, above 0"),
    (("clip",), lambda value: value is None or value > 0, "must be above 0, or None for no clipping"),
    (
        ("steps", "batch_size", "accumulate", "repeats"),
        lambda value: isinstance(value, int) and value >= 1,
        "must be a whole number above 0",
    ),
    (("warmup", "label_smoothing"), lambda value: 0 <= value < 1, "must be at least 0 and below 1"),
    (_NOT_NEGATIVE, lambda value: value >= 0, "must not be negative"),
    (("betas",), lambda value: len(value) == 2, "must be two, such as (0.9, 0.999)"),
    (("betas",), lambda value: all(0 <= b < 1 for b in value), "are two: both must be at least 0, below 1"),
    (("layer_decay",), lambda value: value is None or 0 < value <= 1, "must be above 0, at most 1, or None"),
    (
        ("milestones",),
        lambda value: value is None or len(value) > 0 and all(0 < share < 1 for share in value),
        "must be shares of the run above 0 and below 1, such as (8/9, 26/27), or None for a cosine",
    ),
    (
        ("weight_decay_end",),
        lambda value: value is None or 0 < value < math.inf,
        "must be a finite number above 0, or None for one decay throughout",
    ),
    (("ema",), lambda value: value is None or 0 < value < 1, "must be above 0 and below 1, or None for none"),
    (("mixed_precision",), lambda value: value in ("no", "bf16", "fp16"), "must be 'no', 'bf16' or 'fp16'"),
)


@dataclass(frozen=True)
class Recipe:
    """Everything `train` needs to know besides model, data and seed; checked when it is built.

    Raises `ValueError` for a value that cannot be meant, and for an optimizer that cannot do a step; whether
    one that needs CUDA can, here and now, `require_optimizer` says: its recipe can be read without.
    """

    #: optimiser steps
    steps: int = 1000
    #: images per step, over all processes
    batch_size: int = 128
    #: peak learning rate
    lr: float = 1e-3
    #: the learning rate at the end
    min_lr: float = 0.0
    #: share of the steps in which lr rises linearly from 0
    warmup: float = 0.1
    #: passes over the images, in place of steps, which `on` computes for data of a known size
    epochs: float | None = None
    #: in place of warmup, likewise
    warmup_epochs: float | None = None
    #: lr per 256 images of a step, in place of lr, likewise
    base_lr: float | None = None
    #: AdamW's; biases, norms, positions and tokens are not decayed
    weight_decay: float = 0.05
    #: decays of the optimizer's running averages
    betas: tuple[float, float] = (0.9, 0.999)
    #: factor on lr per layer below the head, None for one lr everywhere
    layer_decay: float | None = None
    #: of the task's cross-entropy
    label_smoothing: float = 0.1
    #: factor on that cross-entropy: 1 but for DeiT's distillations, and 0 where no label is used
    task_weight: float = 1.0
    #: λ, the factor on the transfer loss
    transfer_weight: float = 3.0
    #: largest gradient norm, None for no clipping
    clip: float | None = 1.0
    #: "no", "bf16" or "fp16"
    mixed_precision: str = "no"
    #: a name that timm knows ("adamw", "lamb" ...; those without betas leave `betas` out)
    optimizer: str = "adamw"
    #: parts in which a step's images are computed one after the other, for less memory; the step is the same,
    #: and a loss that is no mean over images refuses it (`require_whole_steps`)
    accumulate: int = 1
    #: decay of the running average of the weights, None for none
    ema: float | None = None
    #: alpha of its Beta distribution (arXiv 1710.09412), 0 for none; with cutmix too, a step uses one of both
    mixup: float = 0.0
    #: likewise (arXiv 1905.04899)
    cutmix: float = 0.0
    #: binary cross-entropy on each class in place of the softmax's (DeiT III, arXiv 2204.07118)
    binary: bool = False
    #: repeated augmentation: how often an image comes in an epoch
    repeats: int = 1
    #: compute activations a second time instead of keeping them
    checkpoint_activations: bool = False
    #: torch.compile
    compile: bool = False
    #: shares of the steps at which lr is divided by ten, in place of the half cosine down to min_lr
    milestones: tuple[float, ...] | None = None
    #: weight decay at the end, above 0, on a half cosine from `weight_decay`; None for one decay throughout
    weight_decay_end: float | None = None

    def __post_init__(self):
        check_fields(self, RULES)
        if self.warmup_epochs is not None and not 0 <= self.warmup_epochs < (self.epochs or 0):
            raise ValueError(
                f"Recipe(warmup_epochs={self.warmup_epochs!r}, epochs={self.epochs!r}): warmup_epochs must be"
                " at least 0 and below epochs; with steps, give warmup, their share"
            )
        if self.weight_decay == 0 and self.weight_decay_end is not None:
            raise ValueError(
                f"Recipe(weight_decay=0, weight_decay_end={self.weight_decay_end!r}): nothing would be"
                " decayed; start above 0, such as weight_decay=1e-6, or leave weight_decay_end out"
            )
        if self.accumulate > self.batch_size:
            raise ValueError(f"Recipe(accumulate={self.accumulate!r}): a step has {self.batch_size} images")
        if self.optimizer != "adamw":
            from timm.optim import list_optimizers  # takes seconds, and most recipes need no look

            require_known("optimizer", self.optimizer, list_optimizers())
        if self.optimizer not in PLAIN and not self.optimizer.startswith(NEED_CUDA):
            try_optimizer(self.optimizer, self.betas)

    def on(self, images: int) -> "Recipe":
        """The same in steps and absolute rates, for a data set of so many training images: the last step of
        an epoch may be smaller, and the rate is in proportion to the batch (Goyal et al. 2017)."""
        absolute: dict[str, Any] = {}
        if self.epochs is not None:
            steps = round(self.epochs * steps_per_epoch(images, self.batch_size))
            absolute |= {"steps": max(1, steps), "epochs": None}
            if self.warmup_epochs is not None:
                absolute |= {"warmup": self.warmup_epochs / self.epochs, "warmup_epochs": None}
        if self.base_lr is not None:
            absolute |= {"lr": self.base_lr * self.batch_size / 256, "base_lr": None}
        return replace(self, **absolute)

    def changed(self, values: Mapping[str, Any]) -> "Recipe":
        """With other values: steps, warmup and lr in place of epochs, warmup_epochs and base_lr. New steps
        leave the warm-up its share. Raises `ValueError` where both of such a pair are given."""
        instead: dict[str, Any] = {}
        if "steps" in values and self.epochs is not None and self.warmup_epochs is not None:
            instead |= {"warmup": self.warmup_epochs / self.epochs, "warmup_epochs": None}
        for name, other in IN_EPOCHS.items():
            if name in values and other in values:
                raise ValueError(f"{name} and {other} exclude each other: give one of them")
            if name in values:
                instead[other] = None
        return replace(self, **(instead | values))

    def require_optimizer(self) -> None:
        """Raise `ValueError` where the optimizer needs CUDA, or a package, that is not here."""
        if self.optimizer.startswith(NEED_CUDA):
            try_optimizer(self.optimizer, self.betas)

    def require_whole_steps(self, why: str) -> None:
        """Raise `ValueError` where a step is computed in parts: for losses that are no sum of their parts."""
        if self.accumulate > 1:
            raise ValueError(
                f"accumulate={self.accumulate}: {why}; set accumulate to 1 and batch_size to what fits"
            )

    def describe(self) -> dict:
        """The recipe as plain JSON values, for a record."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @classmethod
    def described(cls, values: Mapping[str, Any]) -> "Recipe":
        """The recipe that `describe` has described; what a record says beside it, such as its plan, is left
        out."""
        known = {f.name: values[f.name] for f in fields(cls) if f.name in values}
        return cls(
            **{name: tuple(value) if isinstance(value, list) else value for name, value in known.items()}
        )


@lru_cache
def try_optimizer(name: str, betas: tuple[float, float], width: int = 8):
    """timm's optimiser of that name after one step on a layer of `width` x `width` weights. Raises
    `ValueError` with the way out where it cannot do that.

    No random number is drawn from the global generator, and nothing is compiled.
    """
    import torch
    from timm.optim import create_optimizer_v2, get_optimizer_info

    info = get_optimizer_info(name)
    device = "cuda" if name.startswith(NEED_CUDA) and torch.cuda.is_available() else "cpu"
    instead = "take another of timm.optim.list_optimizers(), such as 'adamw', 'lamb' or 'sgd'"
    if info.second_order:
        raise ValueError(f"optimizer={name!r} needs second derivatives, which are not computed: {instead}")
    if info.has_betas and info.num_betas != len(betas):
        raise ValueError(f"optimizer={name!r} takes {info.num_betas} betas, not {len(betas)}: {instead}")
    try:
        with (
            torch.device(device),
            torch.random.fork_rng(devices=[]),
            torch.enable_grad(),
            torch.compiler.set_stance("force_eager"),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")  # advice on how to make it faster
            layer = torch.nn.Linear(width, width, bias=False)
            own = {"betas": betas} if info.has_betas else {}
            optimizer = create_optimizer_v2(layer, opt=name, lr=1e-3, weight_decay=0.05, **own)
            layer(torch.ones(1, width)).sum().backward()
            optimizer.step()
    except Exception as error:  # whatever the optimiser meets first: it is another's code
        cuda = "it runs on CUDA only, with a package of its own"
        why = f"{type(error).__name__}: {error}"
        needs = cuda if name.startswith(NEED_CUDA) else "it cannot do a step"
        raise ValueError(f"optimizer={name!r}: {needs} ({why}); {instead}") from error
    return optimizer


# Masked auto-encoding, AdamW as in He et al. 2022 (arXiv 2111.06377), appendix A: β2 = 0.95, weight decay
# 0.05.
MAE = Recipe(steps=2000, lr=1e-3, betas=(0.9, 0.95), label_smoothing=0.0)
# Of as many steps: SimMIM (arXiv 2111.09886, section 4.1: β2 = 0.999, weight decay 0.05), MoCo-v3 (arXiv
# 2104.02057, section 5: weight decay 0.1) and DINO (arXiv 2104.14294, section 3.2: from 0.04 to 0.4).
SIMMIM = Recipe(steps=2000, lr=1e-3, label_smoothing=0.0)
MOCO = Recipe(steps=2000, lr=1e-3, weight_decay=0.1, label_smoothing=0.0)
DINO = Recipe(steps=2000, lr=1e-3, weight_decay=0.04, weight_decay_end=0.4, label_smoothing=0.0)
# What the book's students start from; each scale has its own steps, and what is tuned replaces the rest.
STUDENT = Recipe(steps=1000)
