"""A pair that trains with the interpreted kernel, on one process or on as many as were started; the first
leaves in FOLDER what came out. `test_fused.py` starts it, with TRITON_INTERPRET set."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from atlib import fused, losses
from tests import two

# The weights' way is then the sum of the gradients. The fifth step has 7 images: 4 and 3.
RECIPE = replace(two.RECIPE, steps=5, optimizer="sgd", lr=0.1)
BUILD = two.RUNS["distill"][0]
calls = 0


def in_float32(student, teacher, value=True):
    """The kernel, which knows no float64, in which all else is computed."""
    global calls
    calls += 1
    student, teacher = (one._replace(q=one.q.float(), k=one.k.float()) for one in (student, teacher))
    return fused.by_kernel(student, teacher, value)


if __name__ == "__main__":
    torch.set_num_threads(1)
    losses.map_free_cross_entropy = in_float32
    two.RUNS["kernel"] = BUILD, RECIPE
    weights, history, steps = two.trained("kernel")
    if os.environ.get("RANK", "0") == "0":
        folder = Path(sys.argv[1])
        save_file(
            {name: value.contiguous() for name, value in weights.items()}, folder / "weights.safetensors"
        )
        world = dist.get_world_size() if dist.is_initialized() else 1
        (folder / "found.json").write_text(json.dumps({"world": world, "steps": steps, "calls": calls}))
    if dist.is_initialized():
        dist.destroy_process_group()
