"""What a training run is made of, as frozen values; defaults are the built-in scale's."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from atlib._util import as_plain, require_known
from atlib.loading import steps_per_epoch

IN_EPOCHS = {"steps": "epochs", "warmup": "warmup_epochs", "lr": "base_lr"}


@dataclass(frozen=True)
class Recipe:
    """What `train` needs to know besides model, data and seed."""

    steps: int = 1000  #: optimiser steps
    batch_size: int = 128  #: images per step, over all processes
    lr: float = 1e-3  #: peak learning rate
    min_lr: float = 0.0  #: the learning rate at the end
    warmup: float = 0.1  #: share of the steps in which lr rises linearly from 0
    #: passes over the images, in place of steps, which `on` computes for data of a known size
    epochs: float | None = None
    warmup_epochs: float | None = None  #: in place of warmup, likewise
    base_lr: float | None = None  #: lr per 256 images of a step, in place of lr, likewise
    #: AdamW's, of all but weights of one dimension (biases, most norms) and what the student's
    #: `no_weight_decay` names (a ViT's positions and tokens)
    weight_decay: float = 0.05
    betas: tuple[float, float] = (0.9, 0.999)  #: decays of the optimizer's running averages
    layer_decay: float | None = None  #: factor on lr per layer below the head, None for one lr everywhere
    label_smoothing: float = 0.1  #: of the task's cross-entropy
    #: factor on that cross-entropy: 1 but for DeiT's distillations, and 0 where no label is used
    task_weight: float = 1.0
    transfer_weight: float = 3.0  #: λ, the factor on the transfer loss
    clip: float | None = 1.0  #: largest gradient norm, None for no clipping
    mixed_precision: str = "no"  #: "no", "tf32" (products of float32, where a GPU has it), "bf16" or "fp16"
    #: a name that timm knows ("adamw", "lamb" ...; those without betas leave `betas` out)
    optimizer: str = "adamw"
    #: parts in which a step's images are computed one after the other, for less memory; the step is the same
    #: but for detectors, whose losses are means over a part's boxes
    accumulate: int = 1
    ema: float | None = None  #: decay of the running average of the weights, None for none
    #: alpha of its Beta distribution (arXiv 1710.09412), 0 for none; with cutmix too, a step uses one of both
    mixup: float = 0.0
    cutmix: float = 0.0  #: likewise (arXiv 1905.04899)
    #: binary cross-entropy on each class in place of the softmax's (DeiT III, arXiv 2204.07118)
    binary: bool = False
    repeats: int = 1  #: repeated augmentation: how often an image comes in an epoch
    checkpoint_activations: bool = False  #: compute activations a second time instead of keeping them
    compile: bool = False  #: torch.compile
    #: shares of the steps at which lr is divided by ten, in place of the half cosine down to min_lr
    milestones: tuple[float, ...] | None = None
    #: weight decay at the end, above 0, on a half cosine from `weight_decay`; None for one decay throughout
    weight_decay_end: float | None = None

    def __post_init__(self):
        def require(fits: bool, name: str, needs: str) -> None:
            if not fits:
                raise ValueError(f"Recipe({name}={getattr(self, name)!r}): {name} must be {needs}")

        # NaN fails every comparison
        for name in ("steps", "batch_size", "accumulate", "repeats"):
            count = getattr(self, name)
            require(isinstance(count, int) and count >= 1, name, "a whole number above 0")
        for name in ("lr", "epochs", "base_lr", "clip", "weight_decay_end"):
            value = getattr(self, name)
            missing = value is None and name != "lr"
            require(missing or 0 < value < math.inf, name, "finite and above 0")
        for name in ("min_lr", "weight_decay", "task_weight", "transfer_weight", "mixup", "cutmix"):
            require(0 <= getattr(self, name) < math.inf, name, "at least 0")
        for name in ("warmup", "label_smoothing"):
            require(0 <= getattr(self, name) < 1, name, "at least 0 and below 1")
        require(len(self.betas) == 2 and all(0 <= b < 1 for b in self.betas), "betas", "two below 1")
        require(self.layer_decay is None or 0 < self.layer_decay <= 1, "layer_decay", "above 0, at most 1")
        require(self.ema is None or 0 < self.ema < 1, "ema", "above 0 and below 1")
        if self.milestones is not None:
            fits = len(self.milestones) > 0 and all(0 < share < 1 for share in self.milestones)
            require(fits, "milestones", "shares of the run, such as (8/9, 26/27)")
        precisions = "no", "tf32", "bf16", "fp16"
        require(self.mixed_precision in precisions, "mixed_precision", f"one of {precisions}")
        require(self.accumulate <= self.batch_size, "accumulate", "at most batch_size")
        if self.warmup_epochs is not None:
            fits = 0 <= self.warmup_epochs < (self.epochs or 0)
            require(fits, "warmup_epochs", f"at least 0 and below epochs={self.epochs!r}")
        # what starts undecayed has no group of weights that are decayed
        decays = self.weight_decay > 0 or self.weight_decay_end is None
        require(decays, "weight_decay", "above 0 where weight_decay_end is given")
        if self.optimizer != "adamw":
            from timm.optim import list_optimizers  # takes seconds, and most recipes need no look

            require_known("optimizer", self.optimizer, list_optimizers())

    def on(self, images: int) -> "Recipe":
        """The same in steps and absolute rates, for so many training images."""
        absolute: dict[str, Any] = {}
        if self.epochs is not None:
            steps = round(self.epochs * steps_per_epoch(images, self.batch_size))
            absolute |= {"steps": max(1, steps), "epochs": None}
            if self.warmup_epochs is not None:
                absolute |= {"warmup": self.warmup_epochs / self.epochs, "warmup_epochs": None}
        if self.base_lr is not None:
            absolute |= {"lr": self.base_lr * self.batch_size / 256, "base_lr": None}  # Goyal et al. 2017
        return replace(self, **absolute)

    def changed(self, values: Mapping[str, Any]) -> "Recipe":
        """With other values; steps, warmup and lr take the place of epochs, warmup_epochs and base_lr."""
        cleared: dict[str, Any] = {}
        if "steps" in values and self.epochs is not None and self.warmup_epochs is not None:  # its share
            cleared |= {"warmup": self.warmup_epochs / self.epochs, "warmup_epochs": None}
        for name, other in IN_EPOCHS.items():
            if name in values and other in values:
                raise ValueError(f"{name} and {other} exclude each other: give one of them")
            if name in values:
                cleared[other] = None
        return replace(self, **(cleared | values))

    def require_whole_steps(self, why: str) -> None:
        """Raise `ValueError` where a step is computed in parts: for losses that are no sum of their parts."""
        if self.accumulate > 1:
            raise ValueError(f"accumulate={self.accumulate}, not 1: {why}")

    def describe(self) -> dict:
        """The recipe as plain JSON values, for a record."""
        return as_plain(self)

    @classmethod
    def described(cls, values: Mapping[str, Any]) -> "Recipe":
        """What `describe` has described; what else a record says is left out."""
        kept = {field.name: values[field.name] for field in fields(cls) if field.name in values}
        return cls(**{n: tuple(value) if isinstance(value, list) else value for n, value in kept.items()})
