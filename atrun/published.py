"""What a recipe is that somebody has published, and what several sources have in common."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from atlib.plan import Plan
from atlib.train.recipe import Recipe
from atrun.data.transforms import Augmentation
from atrun.method import Method


@dataclass(frozen=True)
class Published:
    """A recipe as its source prints it, with its length in epochs and its rate per 256 images."""

    name: str
    #: paper with table or section, and the command where the authors print one
    source: str
    #: a timm name or a preset, or, of a network that neither has, its authors' name
    model: str
    method: Method
    recipe: Recipe
    #: None: images are not changed, except that a detector's are jittered
    augmentation: Augmentation | None
    #: further arguments of the model's constructor
    options: Mapping = field(default_factory=dict)
    #: the timm name whose weights the method starts from or learns from; None where a run must name one
    teacher: str | None = None
    #: what is transferred; None where nothing is
    plan: Plan | None = None
    #: rate of stochastic depth in the last block
    drop_path: float = 0.0
    #: of pre-training without labels: fields of `atrun.parts.Mae`, `Moco`, `Dino` or `Simmim`
    pretext: Mapping = field(default_factory=dict)
    #: of a detector: the run's `detector`, `detector_sizes` and `jitter`
    detection: Mapping = field(default_factory=dict)
    #: what a reader would take for a slip, and where we depart
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
