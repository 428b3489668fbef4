"""Records round-trip, are refused before they are written when they break the schema, and are named when they
cannot be read."""

import json
import os
import platform
import subprocess
from dataclasses import replace

import pytest
import torch

from atbook.records import (
    add_record,
    by_method,
    cost,
    find_record,
    read_file,
    read_records,
    records_file,
    results_folder,
    spread,
)
from atrun import record
from atrun.record import ABOUT, Record, about, read_record, write_record


@pytest.fixture
def good():
    return Record(
        "transfer",
        "copy",
        3,
        {"recipe": {"lr": 1e-3, "betas": [0.9, 0.999]}, "labels": None},
        {"test_accuracy": 0.5, "note": "é\u2028"},
        [{"epoch": 1, "loss": 2.0}, {"epoch": 2, "loss": 1.5}],
        12.5,
        300,
        about(),
    )


@pytest.fixture(params=["alone", "in a file of records"])
def kept(request, tmp_path):
    """Both ways of keeping a record: what writes one, what reads it, and where."""
    if request.param == "alone":
        return write_record, read_record, tmp_path / "a" / "b.json"
    return add_record, lambda path: read_file(path)[-1], tmp_path / "a" / "b.jsonl"


def test_round_trip(kept, good):
    write, read, path = kept
    for changed in (good, replace(good, kind="trial", trial=2), replace(good, kind="teacher")):
        write(path, changed)
        assert read(path) == changed and os.listdir(path.parent) == [path.name]
    values = json.loads(path.read_text().splitlines()[-1] if path.suffix == ".jsonl" else path.read_text())
    assert values["schema"] == 1 and values["results"]["test_accuracy"] == 0.5


@pytest.mark.parametrize(
    "change",
    [
        {"results": {"accuracy": float("nan")}},
        {"results": {"accuracy": float("inf")}},
        {"history": [{"loss": float("nan")}]},
        {"config": {"lr": float("inf")}},
        {"seconds": float("nan")},
        {"seed": 1.5},
        {"seed": True},
        {"method": None},
        {"history": {}},
        {"kind": "rum"},
        {"trial": 0.5},
        {"about": {"python": "3"}},
    ],
    ids=str,
)
def test_what_breaks_the_schema_is_refused_before_anything_is_written(kept, good, change):
    write, read, path = kept
    with pytest.raises(ValueError):
        write(path, replace(good, **change))
    assert not path.parent.exists()
    write(path, good)
    with pytest.raises(ValueError):
        write(path, replace(good, **change))
    assert read(path) == good


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-20],
        lambda text: "",
        lambda text: "\udcff",
        lambda text: "<html></html>",
        lambda text: "[]",
        lambda text: text.replace('"schema": 1', '"schema": 2'),
        lambda text: text.replace('"schema": 1, ', ""),
        lambda text: text.replace('"seed": 3, ', ""),
        lambda text: text.replace('"seed": 3', '"seed": 3, "extra": 1'),
        lambda text: text.replace('"seed": 3', '"seed": "3"'),
        lambda text: text.replace('"test_accuracy": 0.5', '"test_accuracy": NaN'),
    ],
)
def test_damaged_records_are_named_and_left_alone(tmp_path, good, damage):
    path = records_file("transfer", "s", tmp_path)
    for seed in (1, 2, 3):
        add_record(path, replace(good, seed=seed))
    *whole, last = path.read_text().splitlines(keepends=True)
    damaged = damage(last).encode(errors="surrogateescape")
    path.write_bytes("".join(whole).encode() + damaged + b"\n")
    before = path.read_bytes()
    for touch in (lambda: read_records("transfer", "s", results=tmp_path), lambda: add_record(path, good)):
        with pytest.raises(OSError):
            touch()
    assert path.read_bytes() == before
    alone = tmp_path / "r.json"
    alone.write_bytes(damaged)
    with pytest.raises(OSError):
        read_record(alone)


def test_a_record_takes_the_place_of_the_one_of_the_same_run(tmp_path, good):
    path = tmp_path / "records.jsonl"
    others = [
        good,
        replace(good, kind="trial", trial=0),
        replace(good, method="distill"),
        replace(good, seed=4),
    ]
    for written in others:
        add_record(path, written)
    before = path.read_bytes().splitlines()
    again = replace(good, seconds=1.0)
    add_record(path, again)
    assert read_file(path) == [again, *others[1:]] and path.read_bytes().splitlines()[1:] == before[1:]
    path.write_bytes(path.read_bytes() + before[3] + b"\n")  # as a merge may leave it
    with pytest.raises(OSError):
        read_file(path)


def test_a_file_that_is_not_written_to_its_end_is_the_old_one(tmp_path, good, monkeypatch):
    path = add_record(tmp_path / "records.jsonl", good)

    def full(descriptor):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError):
        add_record(path, replace(good, seed=4))
    assert read_file(path) == [good] and list(tmp_path.iterdir()) == [path]


def test_records_of_one_kind_by_method_seed_and_trial(tmp_path, good):
    path = records_file("transfer", "s", tmp_path)
    assert path == tmp_path / "transfer" / "s.jsonl"
    assert records_file("notebooks", None, tmp_path) == tmp_path / "notebooks.jsonl"
    runs = [replace(good, method=method, seed=seed) for method in ("a", "b c") for seed in (2, 10)]
    trials = [replace(good, seed=100, kind="trial", trial=trial) for trial in (0, 2, 10)]
    teacher = replace(good, method="teacher", kind="teacher")
    for written in [*reversed(runs), teacher, *reversed(trials)]:
        add_record(path, written)
    assert read_records("transfer", "s", results=tmp_path) == runs
    assert read_records("transfer", "s", "trial", tmp_path) == trials
    assert read_records("transfer", "s", "teacher", tmp_path) == [teacher]
    assert read_records("transfer", "elsewhere", results=tmp_path) == []
    assert find_record("transfer", "b c", 10, "s", tmp_path) == runs[3]
    with pytest.raises(FileNotFoundError):
        find_record("transfer", "b c", 3, "s", tmp_path)
    with pytest.raises(ValueError):
        find_record("transfer", "b-c", 2, "s", tmp_path)
    with pytest.raises(FileNotFoundError):
        read_record(tmp_path / "nowhere.json")


def test_a_metric_by_method_in_the_order_of_seeds(good):
    records = [
        replace(good, method=method, seed=seed, results={"test_accuracy": seed / 10, "other": 9.0})
        for method, seed in (("distill", 2), ("copy", 1), ("distill", 0), ("copy", 0), ("distill", 1))
    ]
    assert by_method(records, "test_accuracy") == {"distill": [0.0, 0.1, 0.2], "copy": [0.0, 0.1]}
    assert by_method([], "test_accuracy") == {}


def test_about_says_what_it_ran_on(monkeypatch):
    assert about()["processes"] == 1
    monkeypatch.setenv("WORLD_SIZE", "4")
    found = about()
    assert found["processes"] == 4
    assert set(ABOUT) <= set(found)
    assert found["python"] == platform.python_version() and found["torch"] == torch.__version__
    assert found["threads"] == torch.get_num_threads() and "CPUs" in found["device"]
    assert json.loads(json.dumps(found)) == found


def test_commit_marks_changes_and_does_without_git(monkeypatch):
    answers = {"ls-files": "record.py\n", "rev-parse": "0123456789ab\n", "status": ""}

    def git(command, **options):
        assert options["check"] and command[0] == "git"
        return type("Done", (), {"stdout": answers[command[1]]})

    monkeypatch.setattr(record.subprocess, "run", git)
    assert about()["commit"] == "0123456789ab"
    answers["status"] = " M walk.py\n"
    assert about()["commit"] == "0123456789ab+"

    def no_git(*arguments, **options):
        raise FileNotFoundError("git")

    monkeypatch.setattr(record.subprocess, "run", no_git)
    assert about()["commit"] == "unknown"


def test_the_commit_of_a_checkout_that_atlib_is_only_installed_in_is_not_taken(monkeypatch, tmp_path):
    installed = tmp_path / ".venv" / "atrun" / "record.py"
    installed.parent.mkdir(parents=True)
    installed.touch()
    who = ["-c", "user.name=A", "-c", "user.email=a@b.c"]
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    subprocess.run(
        ["git", *who, "commit", "--quiet", "--allow-empty", "-m", "theirs"], cwd=tmp_path, check=True
    )
    monkeypatch.setattr(record, "__file__", str(installed))
    assert about()["commit"] == "unknown"


@pytest.fixture
def clone(tmp_path, monkeypatch):
    for name in ("results", "atlib", "notebooks"):
        (tmp_path / "clone" / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "clone" / "notebooks")
    return tmp_path / "clone"


def test_results_are_found_from_any_folder_of_the_clone(clone):
    assert results_folder() == results_folder(clone) == results_folder(clone / "results") == clone / "results"
    assert records_file("a") == clone / "results" / "a" / "find.jsonl"
    with pytest.raises(FileNotFoundError):
        results_folder(clone.parent)


def test_cost_reads_the_measurement(clone, good):
    assert cost("04-copy") == "The cost of 04-copy is not measured yet."
    machine = good.about | {"device": "A CPU", "threads": 2}
    measured = replace(good, method="04-copy", seconds=150.0, peak_memory_mb=1240.0, about=machine)
    add_record(clone / "results" / "notebooks.jsonl", measured)
    assert cost("04-copy") == "Measured on A CPU, 2 threads: 2.5 minutes, 1.2 GB of memory."


# --- Tables of the book's pages


@pytest.mark.parametrize(
    ("values", "sign", "text"),
    [
        ([1.0, 2.0, 3.0], "", "2.0 ± 1.0"),
        ([5.25], "", "5.2"),
        ([-1.0, -3.0], "+", "−2.0 ± 1.4"),
        ([0.5, 0.5], "+", "+0.5 ± 0.0"),
    ],
)
def test_spread_is_mean_and_sample_standard_deviation(values, sign, text):
    assert spread(values, sign) == text
