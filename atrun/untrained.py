"""The teacher that was never trained: the student's architecture with first weights of its own, by the seed.

What its maps give a student is the control of arXiv 2411.09702 for maps that are worth nothing (table of
pre-training methods, row "none"; mix and match, "Random").
"""

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from atlib.loading import seed_for
from atlib.vit import Architecture
from atrun.method import Method
from atrun.teachers.build import Teacher
from atrun.teachers.load import load_teacher

if TYPE_CHECKING:
    from atrun.config import RunConfig

UNTRAINED = "untrained"  # in place of a teacher's name or file
NOTHING_TO_TUNE = f"fine-tune with --teacher {UNTRAINED} is training from scratch: choose the recipe scratch"


def check_untrained(config: "RunConfig") -> None:
    """Raise `ValueError` for a run that cannot have an untrained teacher."""
    if config.method is Method.FINE_TUNE:
        raise ValueError(NOTHING_TO_TUNE)
    if config.method.pretrains:  # both files would be the folder's teacher.safetensors
        raise ValueError(f"{config.method} makes a teacher: it cannot have --teacher {UNTRAINED}")
    for name in ("teacher_heads", "teacher_architecture"):
        if getattr(config, name) is not None:
            raise ValueError(f"{name}={getattr(config, name)!r}: untrained, it is built like the student")


def untrained_teacher(config: "RunConfig", folder: Path | None = None) -> Teacher:
    """The untrained teacher of a run: what its folder holds, else the one that the run's seed makes.

    It is the student's architecture without class head and stochastic depth, and independent of the student's
    first weights. Raises `OSError` for a stored file that cannot be read or is another model's."""
    name, overrides = config.architecture(0)
    overrides = {key: value for key, value in overrides.items() if key != "drop_path_rate"}
    architecture = Architecture(name, overrides | {"num_classes": 0})
    if folder is not None and (kept := folder / "teacher.safetensors").exists():
        stored = load_teacher(kept, quiet=True)
        if stored.architecture != architecture:
            raise OSError(f"{kept} holds {stored.architecture}, this run has {architecture}")
        return stored
    torch.manual_seed(seed_for(config.seed, "untrained"))
    vit = architecture.build().eval()
    return Teacher(vit, UNTRAINED, architecture, "first weights", used=len(vit.state_dict()), unused=())
