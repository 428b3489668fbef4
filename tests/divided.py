"""What two forked processes do with weights that are divided between them: `main`.

torch takes seconds to import, so one process imports it and forks the others; nothing is computed before the
fork. What came out is in FOLDER. Accelerate knows no FSDP on CPUs, so these processes
tell it that they were started for GPUs: all that follows from there on, by FSDP2 itself, is the same on a CPU
and gloo.
"""

import faulthandler
import json
import os
import shutil
import signal
import socket
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.tensor
from accelerate import PartialState
from accelerate.utils import DistributedType

from atbook.worlds import glyph_images
from atbook.worlds.glyphs import generate
from atfamily.detection.detector import SIZES, detection_loss, mask_rcnn
from atfamily.detection.evaluate import evaluate_detector
from atlib import AttentionTransfer, Plan, create_vit
from atlib.checkpoint import write_tensors
from atlib.evaluate import evaluate_together
from atlib.recipe import Recipe
from atlib.train import train
from atrun.checkpoint_manager import CheckpointManager
from atrun.data.coco import CocoObjects
from tests.detection.coco_folder import coco_folder
from tests.detection.knows import Knows
from tests.launching import surroundings

# Three steps a pass, the last of them with eight images.
RECIPE = Recipe(
    steps=6, batch_size=12, accumulate=2, ema=0.9, mixup=0.8, cutmix=1.0, checkpoint_activations=True
)
ABORTED = "aborted, and made again:"


def ranks(what, *arguments, extra=None) -> list[int]:
    """Run what(rank, *arguments) in two processes; how they ended (-9: killed)."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    numbers: list[int] = []
    for rank in (1, 0):
        number = os.fork()
        if number == 0:
            code = 70
            faulthandler.enable(all_threads=True)  # an abort says where
            try:
                os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
                os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "2")
                os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                os.environ |= {"ACCELERATE_USE_CPU": "true"} | (extra or {})
                code = what(rank, *arguments) or 0
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(code)
        numbers.append(number)
    return [os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]) for number in numbers]


def pretend_gpus() -> None:
    """Accelerate takes these for two on GPUs, whose device is the CPU; again before each training."""
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    os.environ.pop("ACCELERATE_USE_CPU", None)


def small_pair() -> AttentionTransfer:
    torch.manual_seed(1)
    options = {"depth": 2, "embed_dim": 16, "num_heads": 2}
    return AttentionTransfer(
        create_vit("glyphs", **options),
        create_vit("glyphs", drop_path_rate=0.3, **options),
        Plan(how="distill"),
    )


def trained(rank: int, folder: Path, divided: bool) -> None:
    """A pair is trained; with divided weights it is stopped on the way, and new models go on."""
    folder.mkdir(exist_ok=True)
    images, tested_on = glyph_images(generate("train", 32)), glyph_images(generate("test", 30))
    mine: list[float] = []

    def metrics(model) -> dict:
        whole = sum(parameter.numel() for parameter in model.parameters())
        own = (p.to_local() if hasattr(p, "to_local") else p for p in model.parameters())
        mine.append(sum(p.numel() for p in own) / whole)
        found = evaluate_together(model, tested_on)
        return {"accuracy": found.accuracy, "test_loss": found.loss, "count": found.count}

    def go_on(**options):
        if divided:
            pretend_gpus()
        pair, average = small_pair(), small_pair().student
        options |= {"progress": None, "seed": 3, "evaluate": metrics, "evaluate_every": 1}
        history = train(pair, images, RECIPE, average_into=average, **options)
        return pair, average, history

    if divided:
        go_on(keeper=CheckpointManager(folder / "kept", every=100), stop_at=4)
    pair, average, history = go_on(
        **({"keeper": CheckpointManager(folder / "kept", every=100)} if divided else {})
    )
    teacher, untouched = pair.teacher.state_dict(), small_pair().teacher.state_dict()
    found = {
        "world": dist.get_world_size(),
        "history": history,
        "mine": mine,
        "plain": type(pair) is AttentionTransfer and type(pair.student).__name__,
        "teacher kept": all(torch.equal(value, untouched[name]) for name, value in teacher.items()),
    }
    (folder / f"found-{rank}.json").write_text(json.dumps(found))
    write_tensors(folder / f"student-{rank}.safetensors", pair.student.state_dict(), {})
    write_tensors(folder / f"average-{rank}.safetensors", average.state_dict(), {})
    dist.destroy_process_group()


def detected(rank: int, folder: Path, coco: Path) -> None:
    """A detector learns three scenes a process; one whose answers are known is measured on five."""
    train_on, measured_on = (
        CocoObjects(coco / split, coco / "annotations" / f"instances_{split}.json", size=64)
        for split in ("train2017", "val2017")
    )
    torch.manual_seed(1)
    detector = mask_rcnn(create_vit("scenes", num_classes=0), 8, SIZES["small"])
    recipe = Recipe(steps=3, batch_size=4)
    train(detector, train_on, recipe, loss=detection_loss, progress=None)
    found = evaluate_detector(Knows(measured_on, moved=6), measured_on, batch_size=2)
    folder.mkdir(exist_ok=True)
    (folder / f"found-{rank}.json").write_text(json.dumps({"world": dist.get_world_size(), "found": found}))
    write_tensors(folder / f"detector-{rank}.safetensors", detector.state_dict(), {})
    dist.destroy_process_group()


def unless_aborted(made: Path, start, *arguments, **options) -> list[int]:
    """How the two processes of a start ended. On some machines gloo has aborted one of them now and then
    (SIGABRT, once in hundreds of starts), with no word of ours: this start alone is then made again, at most
    twice, without what it had `made`. What they said is kept, and the tests show it as a warning."""
    for attempt in range(3):
        for path in made.parent.glob(f"{made.name}*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        ended = start(*arguments, **options)
        if -signal.SIGABRT not in ended:
            break
        print(f"{ABORTED} {arguments[0].__name__} {made}: {ended}, attempt {attempt + 1}", flush=True)
    return ended


def main(folder: Path) -> dict[str, list[int]]:
    """How the two processes of every start ended, by the start's name."""
    large = surroundings("fsdp2_vit_large")
    whole, divided = folder / "whole", folder / "divided"
    ended = {
        "whole": unless_aborted(whole, ranks, trained, whole, False),
        "divided": unless_aborted(divided, ranks, trained, divided, True, extra=large),
    }
    coco = coco_folder(folder / "coco", train2017=6, val2017=5)
    ended["detected"] = unless_aborted(folder / "detected", ranks, detected, folder / "detected", coco)
    return ended
