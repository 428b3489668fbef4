"""What a recipe is that somebody has published, and what several sources have in common."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from atlib.data.transforms import Augmentation
from atlib.plan import Plan
from atlib.train.recipe import Recipe


@dataclass(frozen=True)
class Published:
    """A recipe as its source prints it, with its length in epochs and its rate per 256 images.

    source: paper with table or section, and the command where the authors print one. model: a timm name or a
    preset, or, of a network that neither has, its authors' name; options: its further constructor arguments.
    method: "scratch", "fine-tune", "copy" or "distill"; "mae" pre-trains without labels; "dmae" and
    "attndistill" are trained from Python only. teacher: the timm name whose weights the method starts from or
    learns from, None where a run must name one. plan: what is transferred, None where nothing is. drop_path:
    rate of stochastic depth in the last block. pretext: of masked auto-encoding, the run's `mask_ratio`,
    `decoder_width`, `decoder_depth` and `decoder_heads`. detection: of a detector, the run's `heads`,
    `head_sizes` and `jitter`; its images are jittered and not augmented otherwise. oddities: what a reader
    would take for a slip, and where we depart.
    """

    name: str
    source: str
    model: str
    method: str
    recipe: Recipe
    augmentation: Augmentation | None
    options: Mapping = field(default_factory=dict)
    teacher: str | None = None
    plan: Plan | None = None
    drop_path: float = 0.0
    pretext: Mapping = field(default_factory=dict)
    detection: Mapping = field(default_factory=dict)
    oddities: tuple[str, ...] = ()


RAND_AUGMENT = Augmentation(rand_augment="rand-m9-mstd0.5-inc1")
ERASED = replace(RAND_AUGMENT, random_erasing=0.25)
# the mean of the patches, then a norm: what MAE's and attention transfer's PyTorch code build
POOLED = {"global_pool": "avg"}
# mixed images, smoothed labels, and gradients as they are
MIXED = {"label_smoothing": 0.1, "mixup": 0.8, "cutmix": 1.0, "clip": None}
# MAE's two recipes: fine-tuning, which Copy and DeiT share much of, and training from scratch, as Distill
TUNED = {"warmup_epochs": 5, "betas": (0.9, 0.999), "weight_decay": 0.05, **MIXED}
SCRATCH = {"warmup_epochs": 20, "base_lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.3, **MIXED}

LAST_BATCH = "Here an epoch has one step more: the published code leaves its incomplete last batch out."
