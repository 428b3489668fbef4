"""Records round-trip, are refused when they break the schema, and are named when they cannot be read."""

import json
import math
import os
import re
import resource
import subprocess
from dataclasses import replace
from types import SimpleNamespace

import pytest
from accelerate import PartialState
from matplotlib.figure import Figure

from atbook.records import add_record, read_file, read_records, records_file, spread
from atlib._util import write_atomically
from atrun import log as run_log
from atrun import record
from atrun.log import RunLog, read_log
from atrun.pictures import as_file
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


# --- The log: every step once, however the run was stopped, for programs and for people


def steps(folder):
    return [entry["step"] for entry in read_log(folder)]


def test_entries_are_appended_as_lines_and_as_text(tmp_path):
    log = RunLog(tmp_path)
    log({"event": "step", "step": 1, "loss": 0.123456789, "lr": 1e-3})
    log({"event": "epoch", "step": 1, "test_accuracy": 0.5})
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [{name: value for name, value in line.items() if name != "seconds"} for line in lines] == [
        {"event": "step", "step": 1, "loss": 0.123456789, "lr": 1e-3},
        {"event": "epoch", "step": 1, "test_accuracy": 0.5},
    ]
    text = (tmp_path / "log.txt").read_text().splitlines()
    assert text[0].startswith("event step · step 1 · loss 0.1235 · lr 0.001 · seconds ") and len(text) == 2


def test_going_on_drops_what_came_after_the_checkpoint_and_the_line_that_was_cut(tmp_path):
    log = RunLog(tmp_path)
    for step in (1, 2, 3, 4):
        log({"step": step, "loss": float(step)})
    log({"step": 4, "test_accuracy": 0.5})
    with open(tmp_path / "log.jsonl", "a") as file:
        file.write('{"step": 5, "lo')
    again = RunLog(tmp_path, after=2)
    assert steps(tmp_path) == [1, 2] and len((tmp_path / "log.txt").read_text().splitlines()) == 2
    again({"step": 3, "loss": 3.0})
    assert steps(tmp_path) == [1, 2, 3]
    assert (tmp_path / "log.txt").read_text().splitlines()[-1].startswith("step 3 · loss 3")


def test_a_full_disk_names_the_file_and_costs_no_line_before(tmp_path):
    """ "No space left on device" was all that a run said."""
    log, record = RunLog(tmp_path), tmp_path / "record.json"
    log({"step": 1})
    record.write_bytes(b"old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "log.jsonl").stat().st_size + 5, hard))
    try:
        for path, write in (
            (tmp_path / "log.jsonl", lambda: log({"step": 2})),
            (record, lambda: write_atomically(record, bytes(1000))),
        ):
            with pytest.raises(OSError, match=re.escape(str(path))):
                write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert steps(tmp_path) == [1] and record.read_bytes() == b"old"
    assert {path.name for path in tmp_path.iterdir()} == {"log.jsonl", "log.txt", "record.json"}


def test_seconds_go_on_where_they_were(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(run_log.time, "perf_counter", lambda: now[0])
    log = RunLog(tmp_path)
    now[0] = 110.0
    log({"step": 1})
    now[0] = 500.0  # stopped, and taken up again much later; what came after step 1 is lost and not counted
    again = RunLog(tmp_path, after=1)
    now[0] = 503.0
    again({"step": 2})
    assert [entry["seconds"] for entry in read_log(tmp_path)] == [10.0, 13.0] and again.seconds == 13.0
    assert RunLog(tmp_path, after=0).seconds == 0.0, "from the beginning there is no time before"


def test_numbers_that_json_does_not_have(tmp_path):
    log = RunLog(tmp_path)
    log({"step": 1, "grad_norm": math.inf, "loss": math.nan})
    (entry,) = [
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
        for line in (tmp_path / "log.jsonl").read_text().splitlines()
    ]
    assert (entry["grad_norm"], entry["loss"]) == ("inf", "nan")


@pytest.mark.parametrize("nonsense", ["nonsense", '{"step": "x", "seconds": 1.0}', "[]"])
def test_a_line_that_is_no_entry_is_named_and_left_out(tmp_path, nonsense):
    whole = [json.dumps({"step": step, "seconds": float(step)}) for step in (1, 2, 3)]
    (tmp_path / "log.jsonl").write_text("\n".join([whole[0], nonsense, *whole[1:], ""]))
    with pytest.warns(UserWarning, match="log.jsonl, line 2 "):
        assert steps(tmp_path) == [1, 2, 3]
    with pytest.warns(UserWarning, match="line 2"):
        log = RunLog(tmp_path, after=2)
    log({"step": 3})
    assert steps(tmp_path) == [1, 2, 3] and log.before == 2.0
    assert read_log(tmp_path / "nowhere") == []


def test_tensorboard_gets_numbers_by_step_and_pictures(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    PartialState(cpu=True)  # as training has begun it
    for after, steps_done in ((0, (1, 2, 3)), (2, (3, 4))):  # killed after step 3, kept at step 2
        log = RunLog(tmp_path, after=after, tracker="tensorboard")
        for step in steps_done:
            log({"event": "step", "step": step, "loss": step + after / 8})
        log.picture("maps", 4, as_file(Figure()))
        log.close()
    shown = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    losses = [(event.step, event.value) for event in shown.Scalars("loss")]
    assert losses == [(1, 1.0), (2, 2.0), (3, 3.25), (4, 4.25)]
    assert set(shown.Tags()["scalars"]) == {"loss", "seconds"} and "maps" in shown.Tags()["images"][0]
