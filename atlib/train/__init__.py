"""One training loop: pre-training, scratch, fine-tuning, Copy and Distill, on one process or many."""

from atlib.train.loop import NonFiniteLoss, Preempted, train
from atlib.train.objectives import Loss, outputs, student_loss, task_loss
from atlib.train.optim import make_optimizer, schedule

__all__ = [
    "Loss",
    "NonFiniteLoss",
    "Preempted",
    "make_optimizer",
    "outputs",
    "schedule",
    "student_loss",
    "task_loss",
    "train",
]
