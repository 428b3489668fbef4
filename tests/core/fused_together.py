"""A pair that trains with the interpreted kernel, on one process and on two, all forked from the one that
calls `learn_together`, which has imported everything and computed nothing; `interpreted_fused.py` does."""

import json
import multiprocessing
import os
from dataclasses import replace

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from atbook.worlds.glyphs import generate
from atlib import fused, losses
from tests import two

# Seven images in steps of four: the second step has three, two for one process and one for the other. With
# SGD the weights' way is the sum of the gradients.
RECIPE = replace(two.RECIPE, steps=2, batch_size=4, optimizer="sgd", lr=0.2)
BUILD = two.RUNS["distill"][0]
calls = 0


def in_float32(student, teacher, value=True):
    """The kernel, which knows no float64, in which all else is computed."""
    global calls
    calls += 1
    student, teacher = (one._replace(q=one.q.float(), k=one.k.float()) for one in (student, teacher))
    return fused.by_kernel(student, teacher, value)


def learn(folder, environment):
    os.environ |= {"ACCELERATE_USE_CPU": "true"} | environment
    torch.set_num_threads(1)
    losses.map_free_cross_entropy = in_float32
    two.generate = lambda split, _: generate(split, 7)
    two.RUNS["kernel"] = BUILD, RECIPE
    weights, _, steps = two.trained("kernel")
    together = dist.is_initialized()
    if not together or dist.get_rank() == 0:
        world = dist.get_world_size() if together else 1
        contiguous = {name: value.contiguous() for name, value in weights.items()}
        save_file(contiguous, folder / f"{world}.safetensors")
        (folder / f"{world}.json").write_text(json.dumps({"steps": steps, "calls": calls}))
    if together:
        dist.destroy_process_group()


def learn_together(folder):
    """How the three processes ended; the folder gets what came out, by number of processes."""
    # as torchrun does: the launcher has the store at which processes meet
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2"}
    meeting |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "LOCAL_WORLD_SIZE": "2"}
    ranks = ({"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in (0, 1))
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=learn, args=(folder, environment))
        for environment in ({}, *(meeting | rank for rank in ranks))
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]
