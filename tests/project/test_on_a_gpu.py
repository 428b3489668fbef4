"""The script for a lent card, on a CPU: its commands are understood, end in time, and go on."""

import json
from importlib import import_module
from pathlib import Path

import on_a_gpu
import pytest
import torch


def log_of(folder):
    return [json.loads(line) for line in (folder / "on_a_gpu.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("small", [True, False])
def test_the_benchmarks_understand_their_commands(tmp_path, monkeypatch, small):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    options = on_a_gpu.parse(["--out", str(tmp_path), *["--small"] * small])
    for part in ("steps", "speeds", "profile", "resumed"):
        for script, *words in on_a_gpu.commands(part, options):
            parsed = import_module(Path(script).stem).parse(words)
            assert parsed.device == ("cpu" if small else "cuda") and parsed.out.parent == tmp_path


def test_a_failing_command_does_not_stop_the_others_and_what_ended_well_is_not_repeated(
    tmp_path, monkeypatch
):
    failing, good = ["-c", "raise SystemExit(3)"], ["-c", "import atbook"]
    monkeypatch.setattr(on_a_gpu, "commands", lambda *_: [failing, good])
    for _ in range(2):
        assert on_a_gpu.main(["--small", "--parts", "study", "--out", str(tmp_path)]) == 1
    entries = [(entry["part"], entry["ended"]) for entry in log_of(tmp_path)]
    assert entries == [("study", "badly"), ("study", "well"), ("study", "badly")]
