"""Records round-trip, are refused before they are written when they break the schema, and are named when they
cannot be read."""

import json
import platform
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from atlib import record
from atlib.record import (
    ABOUT,
    Record,
    about,
    by_method,
    cost,
    peak_memory_mb,
    read_record,
    read_records,
    results_folder,
    write_record,
)


@pytest.fixture
def good():
    return Record(
        "transfer",
        "copy",
        3,
        {"recipe": {"lr": 1e-3, "betas": [0.9, 0.999]}, "labels": None},
        {"test_accuracy": 0.5, "note": "é"},
        [{"epoch": 1, "loss": 2.0}, {"epoch": 2, "loss": 1.5}],
        12.5,
        300,
        about(),
    )


def test_round_trip(tmp_path, good):
    path = write_record(tmp_path / "a" / "b.json", good)
    assert read_record(path) == good
    assert json.loads(path.read_text())["results"]["test_accuracy"] == 0.5


def test_writing_again_replaces_the_file(tmp_path, good):
    path = write_record(tmp_path / "r.json", good)
    write_record(path, replace(good, seed=4))
    assert read_record(path).seed == 4 and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"results": {"accuracy": float("nan")}}, r"results\['accuracy'\] is nan, not a finite number"),
        ({"results": {"accuracy": float("inf")}}, r"results\['accuracy'\] is inf"),
        ({"history": [{"loss": float("nan")}]}, "not JSON compliant|[Oo]ut of range"),
        ({"config": {"lr": float("inf")}}, "not JSON compliant|[Oo]ut of range"),
        ({"seconds": float("nan")}, "not JSON compliant|[Oo]ut of range|seconds is nan"),
        ({"seed": 1.5}, "seed is 1.5, which has the wrong type"),
        ({"seed": True}, "seed is True, which has the wrong type"),
        ({"method": None}, "method is None, which has the wrong type"),
        ({"history": {}}, "history is {}, which has the wrong type"),
        ({"seconds": "12"}, "seconds is '12', which has the wrong type"),
        ({"about": {"python": "3"}}, "about lacks .*'commit'"),
    ],
    ids=str,
)
def test_what_breaks_the_schema_is_refused_before_anything_is_written(tmp_path, good, change, message):
    with pytest.raises(ValueError, match=message):
        write_record(tmp_path / "new" / "r.json", replace(good, **change))
    assert list(tmp_path.iterdir()) == []
    kept = write_record(tmp_path / "r.json", good).read_bytes()
    with pytest.raises(ValueError, match=message):
        write_record(tmp_path / "r.json", replace(good, **change))
    assert (tmp_path / "r.json").read_bytes() == kept


def damage(path, kind):
    text = path.read_text()
    values = json.loads(text)
    content = {
        "cut off": text[:-20],
        "empty": "",
        "no text": "\udcff",
        "a list": "[]",
        "a number": "3",
        "no JSON": "<html></html>",
        "a field missing": json.dumps({name: value for name, value in values.items() if name != "seed"}),
        "a field too many": json.dumps(values | {"extra": 1}),
        "a wrong type": json.dumps(values | {"seed": "3"}),
        "not a number": text.replace('"test_accuracy": 0.5', '"test_accuracy": NaN'),
    }[kind].encode(errors="surrogateescape")
    path.write_bytes(content)
    return content


@pytest.mark.parametrize(
    "kind, says",
    [
        ("cut off", ""),
        ("empty", ""),
        ("no text", ""),
        ("no JSON", ""),
        ("a list", "JSON list"),
        ("a number", "JSON int"),
        ("a field missing", r"missing: \['seed'\]"),
        ("a field too many", r"unknown: \['extra'\]"),
        ("a wrong type", "seed is '3'"),
        ("not a number", "test_accuracy.*nan"),
    ],
)
def test_damaged_records_are_named_and_left_alone(tmp_path, good, kind, says):
    path = write_record(tmp_path / "r.json", good)
    content = damage(path, kind)
    for read in (lambda: read_record(path), lambda: read_records(tmp_path)):
        with pytest.raises(OSError, match=f"r.json is no valid record.*{says}.*left as it is"):
            read()
    assert path.read_bytes() == content


def test_missing_records_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere.json does not exist"):
        read_record(tmp_path / "nowhere.json")
    with pytest.raises(FileNotFoundError, match=f"no records .* below {tmp_path}"):
        read_records(tmp_path)


def test_all_records_of_a_folder_in_the_order_of_their_paths(tmp_path, good):
    for name, seed in (("b", 2), ("a", 1), ("deep/c", 3)):
        write_record(tmp_path / f"{name}.json", replace(good, seed=seed))
    (tmp_path / "notes.txt").write_text("no record")
    assert [found.seed for found in read_records(tmp_path)] == [1, 2, 3]


def test_a_metric_by_method_in_the_order_of_seeds(good):
    records = [
        replace(good, method=method, seed=seed, results={"test_accuracy": seed / 10, "other": 9.0})
        for method, seed in (("distill", 2), ("copy", 1), ("distill", 0), ("copy", 0), ("distill", 1))
    ]
    assert by_method(records, "test_accuracy") == {"distill": [0.0, 0.1, 0.2], "copy": [0.0, 0.1]}
    assert by_method([], "test_accuracy") == {}


def test_about_says_what_it_ran_on():
    found = about()
    assert set(ABOUT) <= set(found)
    assert found["python"] == platform.python_version() and found["torch"] == torch.__version__
    assert found["threads"] == torch.get_num_threads() and "CPUs" in found["device"]
    assert json.loads(json.dumps(found)) == found


def test_commit_marks_changes_and_does_without_git(monkeypatch):
    answers = {"rev-parse": "0123456789ab\n", "status": ""}

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


def test_peak_memory_is_in_megabytes():
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("compares with Linux's /proc/self/status")
    kibibytes = next(
        int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM")
    )
    # Not equal: what a process inherits from the one that started it counts too.
    assert 0.98 * kibibytes * 1.024e-3 <= peak_memory_mb() < 1e5


@pytest.fixture
def clone(tmp_path, monkeypatch):
    for name in ("results", "atlib", "notebooks"):
        (tmp_path / "clone" / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "clone" / "notebooks")
    return tmp_path / "clone"


def test_results_are_found_from_any_folder_of_the_clone(clone):
    assert results_folder() == results_folder(clone) == results_folder(clone / "results") == clone / "results"
    with pytest.raises(
        FileNotFoundError, match=f"no results/ folder in or above {clone.parent}: run this from a clone"
    ):
        results_folder(clone.parent)


def test_cost_reads_the_measurement(clone, good):
    assert cost("05-attention-copy") == "The cost of 05-attention-copy is not measured yet."
    measured = replace(
        good, seconds=150.0, peak_memory_mb=1240.0, about=good.about | {"device": "A CPU", "threads": 2}
    )
    write_record(clone / "results" / "notebooks" / "05-attention-copy.json", measured)
    assert cost("05-attention-copy") == "Measured on A CPU, 2 threads: 2.5 minutes, 1.2 GB of memory."
