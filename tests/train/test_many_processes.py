"""Two processes on the CPU (gloo), really started, with configs/accelerate/two_processes_cpu.yaml: the same
weights as one process, exact metrics, one writer, and errors instead of hangs.

The tolerance: sums in another order differ in the last digits, and Adam divides by the root of tiny squares,
so both sides compute in float64: after 7 steps of lr 1e-3 weights, which have moved by up to 5e-3, are held
to an absolute 1e-9. Losses are averaged over the processes in float32: a relative 1e-6.
"""

import json
import shutil
import time
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from atlib.checkpoint import load_vit
from atlib.evaluate import evaluate, evaluate_together
from atlib.train import train
from atrun.checkpoint_manager import CheckpointManager
from atrun.log import read_log
from atrun.record import read_record
from tests import two
from tests.helpers import ROOT, in_a_fork, made_once, tiny
from tests.launching import FOLDER, accelerate_launch, torchrun

pytestmark = pytest.mark.slow
SURROUNDINGS = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}


@pytest.fixture(scope="module")
def pair_of_processes(tmp_path_factory):
    """What two processes found out together, their folder, and how their launcher ended when one died."""
    folder, found = made_once(tmp_path_factory, "two", find_out)
    assert found["world"] == 2, "accelerate must not have started one process only"
    return folder, found


def find_out(folder):
    words = ["--main_process_port", "0", "--config_file", FOLDER / "two_processes_cpu.yaml"]
    words += [ROOT / "tests" / "two.py", folder]
    done = in_a_fork(folder, accelerate_launch, *map(str, words), seconds=400, **SURROUNDINGS)
    assert (folder / "found.json").exists(), done.said[-4000:]
    seconds = time.time() - (folder / "found.json").stat().st_mtime
    return json.loads((folder / "found.json").read_text()) | {"done": done, "seconds": seconds}


def difference(left, right):
    return max((left[name] - right[name]).abs().max().item() for name in left)


@pytest.mark.parametrize("name", two.RUNS)
def test_two_processes_end_where_one_with_twice_the_batch_does(name, pair_of_processes):
    folder, found = pair_of_processes
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the two processes: another number of threads is one more order of adding
    try:
        weights, history, steps = two.trained(name)
    finally:
        torch.set_num_threads(threads)
    build, recipe = two.RUNS[name]
    first = tiny().state_dict() if recipe.ema else build().state_dict()
    assert difference(weights, first) > (5e-4 if recipe.ema else 1e-3), "the run must have gone somewhere"
    assert difference(load_file(folder / f"{name}.safetensors"), weights) < 1e-9
    assert found[name]["steps"] == pytest.approx(steps, rel=1e-6)
    for theirs, mine in zip(found[name]["history"], history, strict=True):
        assert theirs == pytest.approx(mine, rel=1e-6), "the parts of the loss too"
    assert len(set(found[name]["sums"])) == 1, "both processes hold the same weights"


def test_the_teacher_is_neither_broadcast_nor_averaged(pair_of_processes):
    assert pair_of_processes[1]["teacher kept"] == [True, True]


def test_a_network_with_batch_norm_is_measured_as_the_first_process_keeps_it(pair_of_processes):
    (measured, kept), *others = pair_of_processes[1]["batch norm"]
    assert measured == pytest.approx(kept, abs=1e-6) and others == [[measured, kept]]


def test_metrics_count_every_image_once(pair_of_processes):
    """Batches of 15 of 71 images: three for one process, two for the other, the last of eleven images."""
    alone = evaluate(tiny(3), two.images(), 15)
    for accuracy, loss, count in pair_of_processes[1]["evaluation"]:
        assert (accuracy, count) == (alone.accuracy, 71) and loss == pytest.approx(alone.loss, rel=1e-6)
    assert evaluate_together(tiny(3), two.images(), 15) == alone, "on one process it is evaluate"


def test_one_process_writes_and_all_evaluate(pair_of_processes):
    folder, found = pair_of_processes
    assert found["evaluated on"] == [0, 1]
    newest = CheckpointManager(folder / "kept", every=3).latest()
    assert newest.name == "step-00000007" and len(list(newest.glob("model*.safetensors"))) == 1
    of_processes = sorted(path.name for path in newest.glob("process-*"))
    assert of_processes == [f"process-0000{rank}.safetensors" for rank in range(2)]


def test_a_run_of_two_goes_on_with_the_same_bits(pair_of_processes):
    assert pair_of_processes[1]["resumed"] == [True, True]


def test_a_run_of_two_goes_on_as_one_only_when_it_is_asked_to(pair_of_processes, tmp_path):
    shutil.copytree(pair_of_processes[0] / "kept", tmp_path / "kept")
    shutil.rmtree(tmp_path / "kept" / "step-00000007")  # the one that is left is from the middle
    recipe = replace(two.RECIPE, mixup=0.8, ema=0.9)

    def go_on(*free):
        keeper = CheckpointManager(tmp_path / "kept", 3, free=free)
        return train(tiny(drop_path_rate=0.3), two.images(), recipe, progress=None, keeper=keeper)

    with pytest.raises(ValueError):
        go_on()
    assert go_on("processes")[-1]["step"] == 7


def test_what_one_process_meets_ends_the_run_of_both(pair_of_processes):
    _, found = pair_of_processes
    assert found["not finite"] == [0, 0]
    assert found["preempted"] == ["step-00000003"] * 2


def test_the_command_writes_one_run(pair_of_processes):
    folder, found = pair_of_processes
    out = folder / "commanded"
    assert found["commanded"] == [0, 0] and found["done"].said.count("record: ") == 1
    assert json.loads((out / "checkpoints" / "step-00000005" / "facts.json").read_text())["processes"] == 2
    assert [entry["step"] for entry in read_log(out) if entry["event"] == "step"] == [1, 2, 3, 4, 5]
    assert load_vit(out / "student.safetensors").num_classes == 8
    assert read_record(out / "record.json").results["validation_accuracy"] >= 0


def test_a_dead_process_ends_the_run_in_bounded_time(pair_of_processes):
    """60 s is how long the survivor waits."""
    done, seconds = pair_of_processes[1]["done"], pair_of_processes[1]["seconds"]
    assert done.code == 1 and seconds < 100
    assert "exitcode  : 1" in done.said and "rank      : 1" in done.said


def test_a_run_starts_under_torchrun_too(tmp_path):
    """It says less than `accelerate launch`: ranks and an address alone."""
    program = tmp_path / "program.py"
    program.write_text(
        "from atlib.processes import start_processes\nfrom atlib.recipe import Recipe\n"
        "a = start_processes(Recipe(steps=1, batch_size=1))\nassert a.num_processes == 2, a.state\n"
        "open(f'{__file__[:-10]}{a.process_index}.txt', 'w').write(a.device.type)\na.end_training()\n"
    )
    words = ["--standalone", "--nproc_per_node", "2", str(program)]
    done = in_a_fork(tmp_path, torchrun, *words, seconds=300, PYTHONPATH=str(ROOT), **SURROUNDINGS)
    assert done.code == 0, done.said
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)] == ["cpu", "cpu"]
