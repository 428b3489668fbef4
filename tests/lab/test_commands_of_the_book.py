"""`python -m atbook`: what it prints, where it writes, and its exit code for what does not exist."""

import re
import statistics
from dataclasses import replace

import pytest

from atbook import __main__ as command
from atbook.lab import commands, study
from atbook.records import read_records
from tests import toy


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """An empty working folder, and the toy scale beside the real ones."""
    monkeypatch.chdir(tmp_path)
    toy.few_held_out(monkeypatch)
    real = commands.scales
    for module in (commands, study):
        monkeypatch.setattr(module, "scales", lambda data=None: real(data) | toy.known())
    return tmp_path


def test_an_experiment_writes_records_and_prints_a_table(here, capsys, monkeypatch):
    asked = ["experiment", "transfer", "--scale", "toy", "--seeds", "2", "--methods", "scratch", "copy"]
    assert command.main(asked) == 0
    lines = capsys.readouterr().out.splitlines()
    records = read_records("transfer", "toy", results=here / "results")
    for line, method in zip(lines, ("scratch", "copy"), strict=False):
        scores = [100 * record.results["test_accuracy"] for record in records if record.method == method]
        figures = f"{statistics.mean(scores):.1f} ± {statistics.stdev(scores):.1f}"
        assert line.split() == [method, *figures.split(), "(2", "seeds)"]
    assert lines[-1] == "records: results/transfer/toy.jsonl"
    teachers = {f"teacher-seed{seed}.safetensors" for seed in (0, 1, 100)}
    assert {path.name for path in (here / "runs/transfer/toy").iterdir()} == {"transfer", *teachers}

    toy.forbid_training(monkeypatch)
    before = toy.files(here)
    assert command.main(asked) == 0 and toy.files(here) == before
    assert capsys.readouterr().out.splitlines() == lines
    assert command.main(["experiments"]) == 0 and "transfer: " in capsys.readouterr().out


def test_a_teacher_that_failed_its_gate_ends_it_with_1(here, capsys, monkeypatch):
    gated = replace(toy.TOY, gate=0.01)
    monkeypatch.setattr(study, "scales", lambda data=None: {"toy": gated})
    assert command.main("experiment transfer --scale toy --seeds 1 --methods copy".split()) == 1
    assert re.search("seed 0 .* 0.01", capsys.readouterr().err) and list(here.iterdir()) == []
