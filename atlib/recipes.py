"""What a training run is made of, as frozen values; defaults are the built-in scale's."""

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Recipe:
    """Everything `train` needs to know besides model, data and seed; checked when it is built.

    steps: optimiser steps. batch_size: images per step, over all processes. lr: peak learning rate. min_lr: at the end.
    warmup: share of the steps in which lr rises linearly from 0. weight_decay, betas: AdamW's (no decay on biases, norms,
    positions and tokens). layer_decay: factor on lr per layer below the head, None for one lr everywhere.
    label_smoothing: of the task's cross-entropy. task_weight: the factor on that cross-entropy (1 but for DeiT's distillations, and 0
    where no label is used). transfer_weight: λ, the factor on the transfer loss. clip: largest gradient norm. mixed_precision: "no", "bf16" or "fp16". Raises `ValueError` for a value that cannot be meant.
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
    clip: float = 1.0
    mixed_precision: str = "no"

    def __post_init__(self):
        for name in ("steps", "batch_size", "lr", "clip"):
            if not getattr(self, name) > 0:
                raise ValueError(f"Recipe({name}={getattr(self, name)!r}): {name} must be above 0")
        for name in ("warmup", "label_smoothing"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"Recipe({name}={getattr(self, name)!r}): {name} must be at least 0 and below 1")
        for name in ("min_lr", "weight_decay", "task_weight", "transfer_weight"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"Recipe({name}={getattr(self, name)!r}): {name} must not be negative")
        if self.layer_decay is not None and not 0 < self.layer_decay <= 1:
            raise ValueError(f"Recipe(layer_decay={self.layer_decay!r}): layer_decay must be above 0 and at most 1, or None")
        if self.mixed_precision not in ("no", "bf16", "fp16"):
            raise ValueError(f"Recipe(mixed_precision={self.mixed_precision!r}): choose 'no', 'bf16' or 'fp16'")

    def describe(self) -> dict:
        """The recipe as plain JSON values, for a record."""
        return {f.name: list(v) if isinstance(v := getattr(self, f.name), tuple) else v for f in fields(self)}


# Pre-training on the built-in world: the retrieval pre-text (regression, so no label smoothing).
RETRIEVAL = Recipe(steps=2000, lr=2e-3, label_smoothing=0.0)
# Masked auto-encoding, AdamW as in He et al. 2022 (arXiv 2111.06377), appendix A: β2 = 0.95, weight decay 0.05.
MAE = Recipe(steps=2000, lr=1e-3, betas=(0.9, 0.95), label_smoothing=0.0)
# The same budget for every student of the central table; what is tuned is in `experiment`.
STUDENT = Recipe(steps=1000)
