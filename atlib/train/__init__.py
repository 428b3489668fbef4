"""One training loop: pre-training, scratch, fine-tuning, Copy and Distill, on one process or many."""

from atlib.train.loop import train
from atlib.train.objectives import Loss, outputs, student_loss, task_loss
from atlib.train.optim import make_optimizer, schedule
from atlib.train.trainer import NonFiniteLoss, Preempted

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
