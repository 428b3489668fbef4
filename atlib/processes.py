"""What a run has to do with processes: starting Accelerate, agreeing, and dividing weights."""

import copy
import os
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
    InitProcessGroupKwargs,
    TorchDynamoPlugin,
)
from torch import Tensor, nn

from atlib.pair import Pair
from atlib.recipe import Recipe

# How long a process waits for another before it gives up with an error; longer than any evaluation or
# checkpoint on one process takes.
WAIT = timedelta(minutes=10)
OF_MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")


@contextmanager
def accelerate_as_it_was() -> Iterator[None]:
    """Within it Accelerate's state, which it keeps for the whole process, is that of a run, and how float32
    is multiplied; after it, that of the caller's own Accelerator, where there is one."""
    kinds = AcceleratorState, GradientState
    before = [
        {
            name: dict(value) if isinstance(value, dict) else value
            for name, value in kind._shared_state.items()
        }
        for kind in kinds
    ]
    precision = torch.get_float32_matmul_precision()
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        for kind, state in zip(kinds, before):
            if state:
                kind._shared_state.clear()
                kind._shared_state.update(state)


def start_processes(recipe: Recipe, cpu: bool = False, all_learn: bool = False) -> Accelerator:
    """Accelerate for one run, on one process or on as many as the launcher started. all_learn: whether every
    weight gets a gradient in every step, so that DDP need not look for those that do not.

    torch.compile uses the backend that `accelerate launch --dynamo_backend` names, otherwise inductor, in the
    mode of `--dynamo_mode`: "reduce-overhead" is CUDA graphs, for steps that are mostly launches. Raises
    `ValueError` for a launcher's configuration that asks for DeepSpeed, and where it started other processes
    than know of each other.
    """
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        raise ValueError("DeepSpeed was never run here: use FSDP2 (configs/accelerate/fsdp2_vit_large.yaml)")
    # Accelerate keeps a precision for the whole process; this run may want another
    AcceleratorState._reset_state()
    unused = DistributedDataParallelKwargs(find_unused_parameters=not all_learn)
    backend = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "inductor")
    if in_tf32 := recipe.mixed_precision == "tf32":
        torch.set_float32_matmul_precision("high")
    accelerator = Accelerator(
        mixed_precision="no" if in_tf32 else recipe.mixed_precision,
        cpu=cpu,
        step_scheduler_with_optimizer=False,
        kwargs_handlers=[InitProcessGroupKwargs(timeout=WAIT), unused],
        gradient_accumulation_steps=recipe.accumulate,
        dynamo_plugin=TorchDynamoPlugin(backend) if recipe.compile else None,
        fsdp_plugin=fsdp_plugin(),
    )
    if accelerator.num_processes != (asked := processes_asked()):
        raise ValueError(f"{asked} processes, of which {accelerator.num_processes} know of each other")
    if recipe.mixed_precision == "fp16" and accelerator.device.type == "cpu":
        warnings.warn("mixed_precision='fp16' computes in float32 on a CPU: try 'bf16'", stacklevel=2)
    return accelerator


def require_together() -> None:
    """Raise `ValueError` for one of several processes that do not know of each other: each would write as if
    it were the only one."""
    launched = "LOCAL_RANK" in os.environ or any(name in os.environ for name in OF_MPI)
    if (asked := processes_asked()) > 1 and not launched:
        raise ValueError(f"one of {asked} processes, without a LOCAL_RANK: use `accelerate launch`")
    # what `accelerate launch` sets for several processes, though it has started this one alone
    if not launched and {"MASTER_ADDR", "ACCELERATE_MIXED_PRECISION"} <= os.environ.keys():
        raise ValueError("the launcher was asked for several processes and started one: --multi_gpu or --cpu")


def processes_asked() -> int:
    """How many processes a launcher says that it has started; 1 without one."""
    said = (
        os.environ[name] for name in ("WORLD_SIZE", *OF_MPI, "SLURM_STEP_NUM_TASKS") if name in os.environ
    )
    return int(next(said, 1))


def agree(accelerator: Accelerator, values: Tensor, stop: bool) -> tuple[Tensor, bool]:
    """The means of numbers (n,) over the processes, and whether one of them wants to stop, in one message."""
    if accelerator.num_processes == 1:
        return values, stop
    numbers = torch.cat([values.float(), values.new_tensor([stop], dtype=torch.float32)])
    means = accelerator.reduce(numbers, "mean")
    return means[:-1], means[-1].item() > 0


# --- Weights that are divided among processes (FSDP2): what is trained then, and how the whole weights come
# back ---


def fsdp_plugin() -> FullyShardedDataParallelPlugin | None:
    """FSDP as the launcher's configuration asks for it; None where it does not.

    Weights and gradients travel as float32, and autocast alone decides what is computed in bf16: the numbers
    are those of DDP. Raises `ValueError` for a line of the configuration that would not work here.
    """
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
    """What is to be trained: `model` itself, or, where its weights will be divided, a copy of it on this
    process's device.

    A copy, because dividing a model changes it for good, and the caller's shall be a plain one afterwards. A
    teacher is shared, not copied, and every process has the whole of it: its weights are no parameters of the
    pair, so nothing divides or sends them.
    """
    if accelerator.distributed_type != DistributedType.FSDP:
        return model
    shared = {id(teacher): teacher for teacher in model.teachers} if isinstance(model, Pair) else {}
    return copy.deepcopy(model, shared).to(accelerator.device)


def divide(model: nn.Module) -> None:
    """Let go of other processes' weights, which FSDP keeps after a forward pass: shards alone are left."""
    for module in model.modules():
        if hasattr(module, "reshard"):  # an FSDPModule; nothing else has it
            module.reshard()


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """A model's `state_dict`, divided weights put together; every process must call it, and gets all."""
    divide(model)
    return {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in model.state_dict().items()
    }


def require_undivided(recipe: Recipe, why: str) -> None:
    """Raise `ValueError` where a step is computed in parts, or divided among processes: for losses that are
    no mean over them."""
    recipe.require_whole_steps(why)
    dist = torch.distributed
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(f"this loss needs one process: {why}")
