"""What a run has to do with processes: starting Accelerate, agreeing, and dividing weights."""

import copy
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    TorchDynamoPlugin,
    parse_flag_from_env,
)
from torch import Tensor, nn

from atlib.pair import Pair
from atlib.recipe import Recipe

WAIT = timedelta(minutes=10)  # for another process: longer than any evaluation or checkpoint takes
OF_MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")


@contextmanager
def accelerate_as_it_was() -> Iterator[None]:
    """After it, Accelerate's state and how float32 is multiplied are the caller's again. Denormal numbers are
    0 meanwhile: sharp maps have many, and an Intel CPU multiplies each a hundred times as slowly."""
    kinds = AcceleratorState, GradientState
    before = [copy.copy(kind._shared_state) for kind in kinds]
    for state in before:
        state.update({name: dict(value) for name, value in state.items() if isinstance(value, dict)})
    precision = torch.get_float32_matmul_precision()
    flushed = torch.full((), 1e-39, device="cpu").mul(1) == 0  # torch has no other way to ask
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(bool(flushed))
        torch.set_float32_matmul_precision(precision)
        for kind, state in zip(kinds, before):
            if state:
                kind._shared_state.clear()
                kind._shared_state.update(state)


def start_processes(recipe: Recipe, cpu: bool = False, all_learn: bool = False) -> Accelerator:
    """Accelerate for one run, on one process or on as many as the launcher started. all_learn: every weight
    gets a gradient in every step, so that DDP need not look for those that do not. torch.compile uses the
    backend that `accelerate launch` names, or inductor."""
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        raise ValueError("DeepSpeed was never run here: use FSDP2 (configs/accelerate/fsdp2_vit_large.yaml)")
    AcceleratorState._reset_state()  # it keeps a precision for the whole process
    unused = DistributedDataParallelKwargs(find_unused_parameters=not all_learn)
    named = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()  # `accelerate launch` says "NO" itself
    backend = "inductor" if named == "no" else named
    in_tf32 = recipe.mixed_precision == "tf32"
    precision = "high" if in_tf32 else torch.get_float32_matmul_precision()
    accelerator = Accelerator(
        mixed_precision="no" if in_tf32 else recipe.mixed_precision,
        cpu=cpu,
        step_scheduler_with_optimizer=False,
        kwargs_handlers=[InitProcessGroupKwargs(timeout=WAIT), unused],
        # a plugin, since a number gives way to ACCELERATE_GRADIENT_ACCUMULATION_STEPS
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=recipe.accumulate),
        dynamo_plugin=TorchDynamoPlugin(backend if recipe.compile else "no"),
        fsdp_plugin=fsdp_plugin(),
    )
    torch.set_float32_matmul_precision(precision)  # now: Accelerate takes TF32 for all that is compiled
    if accelerator.num_processes != (asked := processes_asked()):
        raise ValueError(f"{asked} processes, of which {accelerator.num_processes} know of each other")
    if recipe.mixed_precision == "fp16" and accelerator.device.type == "cpu":
        warnings.warn("mixed_precision='fp16' computes in float32 on a CPU: try 'bf16'", stacklevel=2)
    return accelerator


def require_together() -> None:
    """Raise `ValueError` for one of several processes that do not know of each other."""
    launched = "LOCAL_RANK" in os.environ or any(name in os.environ for name in OF_MPI)
    if (asked := processes_asked()) > 1 and not launched:
        raise ValueError(f"one of {asked} processes, without a LOCAL_RANK: use `accelerate launch`")
    # what `accelerate launch` sets for several processes, though it has started this one alone
    if not launched and {"MASTER_ADDR", "ACCELERATE_MIXED_PRECISION"} <= os.environ.keys():
        raise ValueError("the launcher was asked for several processes and started one: --multi_gpu or --cpu")


def processes_asked() -> int:
    """How many processes a launcher says that it has started; 1 without one."""
    names = "WORLD_SIZE", *OF_MPI, "SLURM_STEP_NUM_TASKS"
    return int(next((os.environ[name] for name in names if name in os.environ), 1))


def runs_on_gpu() -> bool:
    """Whether a run trains on CUDA: where there is a GPU, unless `accelerate launch --cpu` started it."""
    return torch.cuda.is_available() and not parse_flag_from_env("ACCELERATE_USE_CPU")


def agree(accelerator: Accelerator, values: Tensor, stop: bool) -> tuple[Tensor, bool]:
    """The means of numbers (n,) over the processes, and whether one of them wants to stop, in one message."""
    if accelerator.num_processes == 1:
        return values, stop
    numbers = torch.cat([values.float(), values.new_tensor([stop], dtype=torch.float32)])
    means = accelerator.reduce(numbers, "mean")
    return means[:-1], means[-1].item() > 0


@contextmanager
def stop_noticed() -> Iterator[list]:
    """Within it SIGTERM, which a cluster sends before it takes a machine away, and the first Ctrl-C are
    only noted in the list that is yielded; not in other threads, and not a signal that is ignored."""
    noticed: list = []
    if threading.current_thread() is not threading.main_thread():
        yield noticed
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    before = {number: handler for number, handler in before.items() if handler != signal.SIG_IGN}

    def note(number: int, frame: object) -> None:
        noticed.append(number)
        if number == signal.SIGINT:
            signal.signal(number, before[number] or signal.SIG_DFL)
            print("\nstopping after this step; Ctrl-C again stops at once", file=sys.stderr)

    try:
        for number in before:
            signal.signal(number, note)
        yield noticed
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


def fsdp_plugin() -> FullyShardedDataParallelPlugin | None:
    """FSDP as the launcher's configuration asks for it, or None. Weights and gradients travel as float32: the
    numbers are those of DDP."""
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() != "true":
        return None
    version = os.environ.get("FSDP_VERSION", "1")
    if version != "2":
        raise ValueError(f"fsdp_version is {version}: set it to 2, which leaves weights names and shapes")
    # half as long to import as torch: not where nothing is divided
    from torch.distributed.fsdp import MixedPrecisionPolicy, StateDictType

    plugin = FullyShardedDataParallelPlugin(mixed_precision_policy=MixedPrecisionPolicy())
    if plugin.state_dict_type != StateDictType.FULL_STATE_DICT:
        raise ValueError(f"fsdp_state_dict_type is {plugin.state_dict_type.name}: set it to FULL_STATE_DICT")
    if plugin.cpu_ram_efficient_loading:
        raise ValueError("fsdp_cpu_ram_efficient_loading is true: set it to false, or the teacher is lost")
    if plugin.activation_checkpointing:
        raise ValueError("fsdp_activation_checkpointing: set the recipe's checkpoint_activations instead")
    return plugin


def to_train(model: nn.Module, accelerator: Accelerator) -> nn.Module:
    """`model`, or, where its weights will be divided, which changes a model for good, a copy on this
    process's device; teachers are shared."""
    if accelerator.distributed_type != DistributedType.FSDP:
        return model
    shared = {id(teacher): teacher for teacher in model.teachers} if isinstance(model, Pair) else {}
    return copy.deepcopy(model, shared).to(accelerator.device)


def divide(model: nn.Module) -> None:
    """Let go of other processes' weights, which FSDP keeps after a forward pass."""
    for module in model.modules():
        if hasattr(module, "reshard"):  # an FSDPModule
            module.reshard()


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """A model's `state_dict`, divided weights put together; every process must call it."""
    divide(model)
    return {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in model.state_dict().items()
    }


def require_undivided(recipe: Recipe, why: str) -> None:
    """Raise `ValueError` where a step is in parts or divided, for a loss that is no mean over them."""
    recipe.require_whole_steps(why)
    dist = torch.distributed
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(f"this loss needs one process: {why}")
