"""What a training run is made of, as frozen values; defaults are the built-in scale's."""

from dataclasses import dataclass, fields

from atlib.names import require_known


@dataclass(frozen=True)
class Recipe:
    """Everything `train` needs to know besides model, data and seed; checked when it is built.

    steps: optimiser steps. batch_size: images per step, over all processes. lr: peak learning rate. min_lr: at the end.
    warmup: share of the steps in which lr rises linearly from 0. weight_decay, betas: AdamW's (no decay on biases, norms,
    positions and tokens). layer_decay: factor on lr per layer below the head, None for one lr everywhere.
    label_smoothing: of the task's cross-entropy. task_weight: the factor on that cross-entropy (1 but for DeiT's distillations, and 0
    where no label is used). transfer_weight: λ, the factor on the transfer loss. clip: largest gradient norm, None for no clipping.
    mixed_precision: "no", "bf16" or "fp16".

    optimizer: a name that timm knows ("adamw", "lamb" ...; those without betas leave `betas` out). accumulate: parts in which a step's images
    are computed one after the other, for less memory; the step is the same. ema: decay of the running average of the weights, None for none.
    mixup, cutmix: alphas of the Beta distributions (arXiv 1710.09412, 1905.04899), 0 for none; with both, a step uses one or the other.
    binary: binary cross-entropy on each class in place of the softmax's (DeiT III, arXiv 2204.07118). repeats: repeated augmentation, how often
    an image comes in an epoch. checkpoint_activations: compute activations a second time instead of keeping them. compile: torch.compile.
    Raises `ValueError` for a value that cannot be meant.
    """

    steps: int = 1000
    batch_size: int = 128
    lr: float = 1e-3
    min_lr: float = 0.0
    warmup: float = 0.1
    weight_decay: float = 0.05
    betas: tuple[float, float] = (0.9, 0.999)
    layer_decay: float | None = None
    label_smoothing: float = 0.1
    task_weight: float = 1.0
    transfer_weight: float = 3.0
    clip: float | None = 1.0
    mixed_precision: str = "no"
    optimizer: str = "adamw"
    accumulate: int = 1
    ema: float | None = None
    mixup: float = 0.0
    cutmix: float = 0.0
    binary: bool = False
    repeats: int = 1
    checkpoint_activations: bool = False
    compile: bool = False

    def __post_init__(self):
        for name in ("steps", "batch_size", "lr", "clip"):
            if not (name == "clip" and self.clip is None) and not getattr(self, name) > 0:
                raise ValueError(f"Recipe({name}={getattr(self, name)!r}): {name} must be above 0" + (", or None for no clipping" if name == "clip" else ""))
        for name in ("accumulate", "repeats"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"Recipe({name}={getattr(self, name)!r}): {name} must be a whole number, at least 1")
        for name in ("warmup", "label_smoothing"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"Recipe({name}={getattr(self, name)!r}): {name} must be at least 0 and below 1")
        for name in ("min_lr", "weight_decay", "task_weight", "transfer_weight", "mixup", "cutmix"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"Recipe({name}={getattr(self, name)!r}): {name} must not be negative")
        if self.layer_decay is not None and not 0 < self.layer_decay <= 1:
            raise ValueError(f"Recipe(layer_decay={self.layer_decay!r}): layer_decay must be above 0 and at most 1, or None")
        if self.ema is not None and not 0 < self.ema < 1:
            raise ValueError(f"Recipe(ema={self.ema!r}): the decay of the average must be above 0 and below 1, or None for no average")
        if self.mixed_precision not in ("no", "bf16", "fp16"):
            raise ValueError(f"Recipe(mixed_precision={self.mixed_precision!r}): choose 'no', 'bf16' or 'fp16'")
        if self.accumulate > self.batch_size:
            raise ValueError(f"Recipe(accumulate={self.accumulate!r}): a step of {self.batch_size} images has no more parts than that")
        if self.optimizer != "adamw":
            from timm.optim import list_optimizers  # imported here: timm takes seconds, and most recipes need no look

            require_known("optimizer", self.optimizer, list_optimizers())

    def describe(self) -> dict:
        """The recipe as plain JSON values, for a record."""
        return {f.name: list(v) if isinstance(v := getattr(self, f.name), tuple) else v for f in fields(self)}


# Pre-training on the built-in world: the retrieval pre-text (regression, so no label smoothing).
RETRIEVAL = Recipe(steps=2000, lr=2e-3, label_smoothing=0.0)
# Masked auto-encoding, AdamW as in He et al. 2022 (arXiv 2111.06377), appendix A: β2 = 0.95, weight decay 0.05.
MAE = Recipe(steps=2000, lr=1e-3, betas=(0.9, 0.95), label_smoothing=0.0)
# The same budget for every student of the central table; what is tuned is in `experiment`.
STUDENT = Recipe(steps=1000)
