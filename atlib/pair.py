"""A student with its teacher: the base of attention transfer, and of the methods that it is compared with."""

from abc import ABC, abstractmethod

from torch import nn


class Pair(nn.Module, ABC):
    """A student, which is trained, with the frozen teachers that it learns from; with none, where all that it
    needs of a teacher is in buffers.

    Only the student is part of the module, with what a method learns beside it: `parameters()`,
    `state_dict()`, `train()` and DDP never see a teacher. The teachers passed in are frozen in place (eval
    mode, no gradients) and move with `.to(...)`. Raises `ValueError` for a student that is its own teacher.

    A base class, not a protocol: since Python 3.12 `isinstance` with a protocol does not find the submodules
    of a module.
    """

    # Why `walk` refuses it, and what it walks instead; every class that it refuses may say so.
    not_walkable = "it is a teacher and a student: walk its .student or its .teacher"

    def __init__(self, student: nn.Module, *teachers: nn.Module):
        super().__init__()
        if any(teacher is student for teacher in teachers):
            raise ValueError("teacher and student are the same object: build a second ViT")
        self.student = student
        # A tuple keeps teachers out of nn.Module's registration: they are inputs of the method, not parts.
        self._teachers = tuple(teacher.eval().requires_grad_(False) for teacher in teachers)

    @property
    def teacher(self) -> nn.Module:
        """The frozen teacher; the first, where there are several."""
        return self._teachers[0]

    @property
    def teachers(self) -> tuple[nn.Module, ...]:
        """All frozen teachers."""
        return self._teachers

    @property
    @abstractmethod
    def needs_teacher(self) -> bool:
        """Whether the student works at inference only together with what came from its teacher."""

    def _apply(self, fn, recurse=True):
        # .to(device), .double(), .cuda() reach the teachers although they are not registered
        for teacher in self._teachers:
            teacher._apply(fn, recurse)
        return super()._apply(fn, recurse)


def student_of(model: nn.Module) -> nn.Module:
    """What is trained to classify: the student of a pair; any other model is its own."""
    return model.student if isinstance(model, Pair) else model
