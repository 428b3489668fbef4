"""`make gpu`: its parts are begun in order, skipped where their records are, and stopped when the time is up;
at toy size all of it is really done."""

import signal
import subprocess
import sys
import time
from dataclasses import replace

import datasets
import pytest
import resumed_run
import torch
import transfer_step

from atlib.__main__ import main as atlib_main
from atlib.lab.scales import PHOTO_METHODS, TUNING_SEED, scales
from atlib.record import Record, about, add_record, read_file
from tests.helpers import ROOT
from tests.lab.test_scales import write_cifar
from tools import gpu


def record(name):
    return Record("benchmarks", name, 0, {}, {}, [], 1.0, 1.0, about())


def part(file, name, before="", code="open(sys.argv[1], 'a').write(sys.argv[2])"):
    """A part that does what `before` says and then leaves its record; without importing torch for it."""
    line = add_record(file.with_name(f"{name}.jsonl"), record(name)).read_text()
    command = [sys.executable, "-c", f"import sys; {before}{code}", str(file), line]
    return gpu.Part(name, command, file, {("run", name, 0, None)})


def run_here(command, seconds):
    """`gpu.run_for` without a process, which would import torch once more for each part."""
    _, what, *rest = command
    if what == "-m":
        return atlib_main(rest[1:])
    resumed_run.main(rest)
    return 0


def options(tmp_path, *more):
    return gpu.parse(["--work", str(tmp_path / "work"), "--out", str(tmp_path / "out"), *more])


def test_the_parts_in_order(tmp_path):
    given = options(tmp_path, "--data", str(tmp_path))
    every = gpu.parts(given)
    costs = [f"transfer_step-{model}-{n}-cuda-bf16" for model in ("base", "large") for n in (197, 785)]
    resumed = [f"resumed_run-cifar-cuda-{dtype}" for dtype in ("bf16", "fp16")]
    assert [each.says for each in every] == [*costs, *resumed, "teachers, cifar10", "students, cifar10"]
    *_, teachers, students = every
    assert teachers.keys == {("run", m, seed, None) for m in ("scratch", "fine-tune") for seed in range(3)}
    assert len(students.keys) == 3 * 10 and {m for _, m, *_ in students.keys} < set(PHOTO_METHODS)
    assert "1" == teachers.command[teachers.command.index("--jobs") + 1], "SIGTERM must reach a teacher"
    assert not any(each.done for each in every)


@pytest.mark.parametrize("index", range(6))
def test_a_benchmark_is_named_as_its_record_will_be(tmp_path, monkeypatch, index):
    """The scripts' own names of their records, from the options they are given."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    each = gpu.parts(options(tmp_path))[index]
    script, arguments = each.command[1], each.command[2:]
    of_script = transfer_step if script.endswith("transfer_step.py") else resumed_run
    given = of_script.parse(arguments)
    assert each.keys == {("run", of_script.name_of(given), 0, None)} and given.out == each.file
    assert of_script.__file__ == script


def test_what_is_recorded_is_skipped_and_a_failure_keeps_back_what_begins_with_it(tmp_path, capfd):
    file = tmp_path / "records.jsonl"
    every = [part(file, "a"), part(file, "b", "sys.exit('b cannot'); "), part(file, "c")]
    with_b = part(file, "d")
    every.append(with_b._replace(keys=with_b.keys | every[1].keys))
    add_record(file, replace(record("a"), seconds=7.0))
    assert gpu.work_off(every, time.monotonic() + 300) == 1
    assert {each.method: each.seconds for each in read_file(file)} == {"a": 7.0, "c": 1.0}
    assert "what failed: b\n" in capfd.readouterr().err
    every[1] = part(file, "b")
    assert gpu.work_off(every, time.monotonic() + 300) == 0
    assert sorted(each.method for each in read_file(file)) == ["a", "b", "c", "d"]
    assert gpu.work_off([part(file, "e", code="")], time.monotonic() + 300) == 1, "it left no record"


def test_when_the_time_is_up_the_part_gets_sigterm_and_the_next_call_goes_on(tmp_path, capfd):
    """It keeps a file when it is stopped, as a teacher does, and is done at once when it finds it."""
    file, kept = tmp_path / "records.jsonl", tmp_path / "kept"
    before = (
        f"import pathlib, signal, time; kept = pathlib.Path({str(kept)!r})\n"
        "def keep(*_): kept.touch(); sys.exit(75)\n"
        "signal.signal(signal.SIGTERM, keep)\n"
        "kept.exists() or (print('ready', flush=True), time.sleep(300))\n"
    )
    every = [part(file, "long", before), part(file, "next")]
    start = time.monotonic()
    assert gpu.work_off(every, start + 2) == 75 and time.monotonic() - start < 2 + gpu.GRACE
    assert kept.exists() and not file.exists()
    assert "call again, 2 of 2 parts" in capfd.readouterr().out
    # the first one of a call begins however little time there is, the next one only with enough
    assert gpu.work_off(every, time.monotonic() + 0.9 * gpu.NEEDED) == 75
    assert [each.method for each in read_file(file)] == ["long"]
    assert "call again, 1 of 2 parts" in capfd.readouterr().out


@pytest.mark.slow
def test_its_part_ends_with_it():
    """SIGTERM, as whoever counts the minutes may send it to the whole command."""
    child = "import time; print('child', flush=True); time.sleep(300)"
    program = (
        "import signal, sys; from tools import gpu\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
        f"gpu.run_for([sys.executable, '-c', {child!r}], 300)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as one:
        assert one.stdout.readline() == "child\n"
        one.send_signal(signal.SIGTERM)
        assert one.stdout.read() == "", "the child's end of the pipe is closed"
        assert one.wait() == 75


@pytest.mark.parametrize(
    "arguments, named",
    [("--minutes 1", "got 1"), ("--minutes nan", "got nan"), ("--data nowhere", "nowhere is no folder")],
)
def test_bad_arguments_are_refused(arguments, named, capsys):
    with pytest.raises(SystemExit):
        gpu.parse(arguments.split())
    assert named in capsys.readouterr().err


@pytest.mark.parametrize("arguments", ["--steps 3", "--batch 0", "--dtype fp16", "--device cuda"])
def test_a_resumed_run_refuses_what_it_cannot_do(arguments, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        resumed_run.parse(arguments.split())
    named = {"--steps": "3 of 500", "--batch": "100 of 0"}.get(arguments.split()[0], arguments)
    assert named in capsys.readouterr().err.splitlines()[-1]


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 1
    said = capsys.readouterr().err
    assert "CUDA" in said and said.count("\n") == 1


@pytest.mark.slow
def test_all_of_it_at_toy_size(tmp_path, monkeypatch, capfd):
    """But for the cost of a step, whose record is there: test_benchmarks.py measures it at toy size."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(gpu, "run_for", run_here)
    datasets.disable_progress_bars()
    for split, size in (("train", 800), ("test", 100)):
        write_cifar(tmp_path / "data" / f"{split}.parquet", size)
    results = tmp_path / "work" / "results"
    add_record(results / "benchmarks.jsonl", record("transfer_step-tiny-197-cpu"))
    command = ["--toy", "--data", str(tmp_path / "data"), "--work", str(tmp_path / "work"), "--minutes", "30"]
    previous = signal.getsignal(signal.SIGTERM)
    try:
        assert gpu.main(command) == 0
        assert "1 of 3 parts are recorded" in capfd.readouterr().out
        benchmarks, runs = (
            read_file(results / name) for name in ("benchmarks.jsonl", "transfer/cifar10-toy.jsonl")
        )
        resumed = {each.method: each.results for each in benchmarks}["resumed_run-glyphs-cpu-bf16"]
        assert resumed["final_loss"] == resumed["final_loss_resumed"] and resumed["weights_apart"] == 0
        assert 0 < resumed["resumed_at"] < resumed["steps"] == 4 and resumed["images_per_second"] > 0
        methods = scales()["cifar10-toy"].methods
        teachers = {("teacher", "teacher", seed, None) for seed in (0, TUNING_SEED)}
        trials = {("trial", method, TUNING_SEED, trial) for method in methods for trial in range(3)}
        assert {each.key for each in runs} == teachers | trials | {("run", m, 0, None) for m in methods}
        assert len(methods) == 3 and all(
            0 < each.results["evenness"] <= 1 for each in runs if each.kind == "teacher"
        )
        before = (results / "transfer" / "cifar10-toy.jsonl").read_bytes()
        assert gpu.main(command) == 0, "all is recorded"
        assert (results / "transfer" / "cifar10-toy.jsonl").read_bytes() == before
    finally:
        signal.signal(signal.SIGTERM, previous)
