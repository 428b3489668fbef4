"""What a run has to do with processes: starting Accelerate, agreeing on what one of them saw, and hearing the signal to stop."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs
from torch import Tensor

from atlib.recipes import Recipe
from atlib.sharding import deepspeed_plugin, fsdp_plugin

# How long a process waits for another before it gives up with an error; longer than any evaluation or checkpoint on one process takes.
WAIT = timedelta(minutes=10)


def start_processes(recipe: Recipe, cpu: bool = False) -> Accelerator:
    """Accelerate for one run, on one process or on as many as the launcher started.

    torch.compile uses the backend that `accelerate launch --dynamo_backend` names, otherwise inductor.
    """
    AcceleratorState._reset_state()  # Accelerate keeps a precision for the whole process; this run may want another
    # Copied attention leaves some weights without a gradient, a norm of q and k for one.
    handlers = [InitProcessGroupKwargs(timeout=WAIT), DistributedDataParallelKwargs(find_unused_parameters=True)]
    backend = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "inductor") if recipe.compile else None
    return Accelerator(mixed_precision=recipe.mixed_precision, cpu=cpu, step_scheduler_with_optimizer=False, kwargs_handlers=handlers,
                       gradient_accumulation_steps=recipe.accumulate, dynamo_backend=backend, fsdp_plugin=fsdp_plugin(),
                       deepspeed_plugin=deepspeed_plugin(recipe))


def agree(accelerator: Accelerator, value: Tensor, stop: bool) -> tuple[Tensor, bool]:
    """The mean of a scalar over the processes, and whether one of them wants to stop: the same on all, in one message."""
    if accelerator.num_processes == 1:
        return value, stop
    mean, asked = accelerator.reduce(torch.stack([value.float(), value.new_tensor(float(stop)).float()]), "mean")
    return mean, asked.item() > 0


@contextmanager
def sigterm_noticed(active: bool) -> Iterator[list]:
    """Within the block SIGTERM, which a cluster sends before it takes a machine away, ends nothing: it is noted in the list that is yielded.

    Not `active`, or in a thread that Python delivers no signals to, the signal keeps its meaning.
    """
    noticed: list = []
    if not active or threading.current_thread() is not threading.main_thread():
        yield noticed
        return
    previous = signal.signal(signal.SIGTERM, lambda *_: noticed.append(True))
    try:
        yield noticed
    finally:
        signal.signal(signal.SIGTERM, previous or signal.SIG_DFL)
