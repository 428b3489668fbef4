"""The script for a lent card, rehearsed on a CPU: its parts write records, end in time, and go on."""

import json

import on_a_gpu
import pytest

from atbook.records import read_file


def log_of(folder):
    return [json.loads(line) for line in (folder / "on_a_gpu.jsonl").read_text().splitlines()]


RECORDS = {"steps": "transfer_step"}


@pytest.mark.slow
@pytest.mark.parametrize("part", ["steps", "study"])
def test_a_rehearsal(tmp_path, part):
    arguments = ["--small", "--parts", part, "--out", str(tmp_path)]
    assert on_a_gpu.main(arguments) == 0
    entries = log_of(tmp_path)
    assert [(entry["part"], entry["ended"]) for entry in entries] == [(part, "well")]
    if part in RECORDS:
        (record,) = read_file(tmp_path / "benchmarks.jsonl")
        assert record.method.startswith(RECORDS[part])
    assert on_a_gpu.main(arguments) == 0 and log_of(tmp_path) == entries, "what has ended is not run again"


def test_a_command_that_takes_too_long_is_stopped_and_run_again(tmp_path, monkeypatch):
    monkeypatch.setattr(on_a_gpu, "commands", lambda *_: [["-c", "import time; time.sleep(60)"], ["-c", ""]])
    arguments = ["--small", "--parts", "tests", "--seconds", "1", "--out", str(tmp_path)]
    for _ in range(2):
        assert on_a_gpu.main(arguments) == 1
    entries = log_of(tmp_path)
    assert [entry["ended"] for entry in entries] == ["in time", "in time"]
    assert all(entry["seconds"] < 20 for entry in entries)


def test_a_command_that_fails_does_not_stop_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(on_a_gpu, "commands", lambda *_: [["-c", "raise SystemExit(3)"], ["-c", ""]])
    assert on_a_gpu.main(["--small", "--parts", "tests", "--out", str(tmp_path)]) == 1
    assert [entry["ended"] for entry in log_of(tmp_path)] == ["badly", "well"]
