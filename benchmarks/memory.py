"""Peak memory of an action, as the allocator counts it, on a GPU and on a CPU.

On a GPU it is `torch.cuda.max_memory_allocated`. PyTorch keeps no such figure for the CPU, so there every
allocation and every release of the CPU allocator is listed by torch's profiler and added up: the largest sum
is the peak. Both figures count bytes that tensors hold. They do not depend on what the C library gives back
to the system and when, nor on which pages of libtorch happened to be loaded, both of which move the resident
size of a process by tens of MB. They leave out the working space of the matrix-product libraries, a few MB
for each thread, which is the same for every method.
"""

import gc
import json
import os
import tempfile
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

# read when profiling starts: no messages about GPUs that are not there
os.environ.setdefault("KINETO_LOG_LEVEL", "5")


def peak_allocated(action: Callable[[], object], device: torch.device) -> int:
    """The most bytes of tensors alive at any time during `action()`, above those alive before it. The result
    of `action` is dropped."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        action()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        action()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    # 0: CPU
    changes = [
        event for event in events if event.get("name") == "[memory]" and event["args"]["Device Type"] == 0
    ]
    changes.sort(key=lambda event: event["args"]["Ev Idx"])  # the order they happened in; times can be equal
    return max(accumulate((event["args"]["Bytes"] for event in changes), initial=0))
