"""Records round-trip, are refused when they break the schema, and are named when they cannot be read."""

import json
import os
import subprocess
from dataclasses import replace
from types import SimpleNamespace

import pytest

from atbook.records import add_record, read_file, read_records, records_file, spread
from atrun import record
from atrun.record import Record, about, read_record, write_record


@pytest.fixture
def good():
    config = {"recipe": {"lr": 1e-3, "betas": [0.9, 0.999]}, "labels": None}
    results = {"test_accuracy": 0.5, "note": "é\u2028"}
    history = [{"epoch": 1, "loss": 2.0}, {"epoch": 2, "loss": 1.5}]
    return Record("transfer", "copy", 3, config, results, history, 12.5, 300, about())


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


NAN = float("nan")
CHANGES = [{"results": {"accuracy": NAN}}, {"history": [{"loss": NAN}]}, {"config": {"lr": float("inf")}}]
CHANGES += [{"seconds": NAN}, {"seed": True}, {"method": None}, {"kind": "rum"}, {"about": {"python": "3"}}]


@pytest.mark.parametrize("change", CHANGES, ids=str)
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
        lambda text: "\udcff",
        lambda text: text.replace('"schema": 1', '"schema": 2'),
        lambda text: text.replace('"seed": 3, ', ""),
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
    trial = replace(good, kind="trial", trial=0)
    others = [good, trial, replace(good, method="distill"), replace(good, seed=4)]
    for written in others:
        add_record(path, written)
    before = path.read_bytes().splitlines()
    again = replace(good, seconds=1.0)
    add_record(path, again)
    assert read_file(path) == [again, *others[1:]] and path.read_bytes().splitlines()[1:] == before[1:]
    path.write_bytes(path.read_bytes() + before[3] + b"\n")  # as a merge may leave it
    with pytest.raises(OSError):
        read_file(path)


def test_a_commit_with_changes_is_marked(monkeypatch):
    answers = {"ls-files": "record.py\n", "rev-parse": "0123456789ab\n", "status": " M walk.py\n"}
    done = lambda command, **options: SimpleNamespace(stdout=answers[command[1]])  # noqa: E731
    monkeypatch.setattr(record.subprocess, "run", done)
    assert about()["commit"] == "0123456789ab+"


def test_the_commit_of_a_checkout_that_atlib_is_only_installed_in_is_not_taken(monkeypatch, tmp_path):
    installed = tmp_path / ".venv" / "atrun" / "record.py"
    installed.parent.mkdir(parents=True)
    installed.touch()
    who = ["-c", "user.name=A", "-c", "user.email=a@b.c"]
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    commit = ["commit", "--quiet", "--allow-empty", "-m", "theirs"]
    subprocess.run(["git", *who, *commit], cwd=tmp_path, check=True)
    monkeypatch.setattr(record, "__file__", str(installed))
    assert about()["commit"] == "unknown"


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
