"""`python -m atlib`: what it prints, where it writes, and its exit code when it is asked for what does not
exist."""

import re
import statistics
import subprocess
import sys

import pytest

from atlib import __main__ as command
from atlib.lab import commands, study
from atlib.record import read_records
from tests import toy
from tests.helpers import ROOT


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """An empty working folder, and the toy scale beside the real ones."""
    monkeypatch.chdir(tmp_path)
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
        assert line.split() == [
            method,
            f"{statistics.mean(scores):.1f}",
            "±",
            f"{statistics.stdev(scores):.1f}",
            "(2",
            "seeds)",
        ]
    assert lines[-1] == "records: results/transfer/toy.jsonl"
    assert {path.name for path in (here / "runs" / "transfer" / "toy").iterdir()} == {
        "transfer",
        *(f"teacher-seed{seed}.safetensors" for seed in (0, 1, 100)),
    }

    toy.forbid_training(monkeypatch)
    before = toy.files(here)
    assert command.main(asked) == 0 and toy.files(here) == before
    assert capsys.readouterr().out.splitlines() == lines


def test_records_and_weights_go_where_they_are_sent(here, capsys):
    assert (
        command.main(
            [
                "experiment",
                "transfer",
                "--scale",
                "toy",
                "--seeds",
                "1",
                "--methods",
                "copy",
                "--out",
                "there",
                "--work",
                "elsewhere",
            ]
        )
        == 0
    )
    assert {path.name for path in here.iterdir()} == {"there", "elsewhere"}
    assert [record.method for record in read_records("transfer", "toy", results=here / "there")] == ["copy"]
    assert (here / "elsewhere" / "teacher-seed0.safetensors").exists()
    line, _ = capsys.readouterr().out.splitlines()
    assert line.startswith("copy ") and line.endswith("(1 seed)") and "±" not in line


@pytest.mark.parametrize(
    "asked, says",
    [
        ("transfr", "unknown experiment 'transfr'. Did you mean 'transfer'"),
        ("transfer --scale build-in", "unknown scale 'build-in'. Did you mean 'built-in'"),
        (
            "transfer --scale toy --methods scratch destill",
            "unknown method 'destill'. Did you mean 'distill'",
        ),
        (
            "transfer --methods copy-q",
            (
                "unknown method 'copy-q'.* Known: 'scratch', 'fine-tune', 'copy', 'copy-untrained',"
                " 'copy-fine-tuned', 'distill'"
            ),
        ),
        ("transfer --scale toy --seeds 0", "--seeds and --jobs must be at least 1, got 0 and 1"),
        ("transfer --scale toy --jobs 0", "must be at least 1"),
        ("transfer --scale cifar10-cpu --data nowhere", "nowhere does not exist"),
        ("distillation --scale toy", "distill is not tuned yet"),
        ("shifts --scale toy", "shifts is made for the scale 'built-in', not for 'toy'"),
        ("shifts --methods copi", "unknown method 'copi'. Did you mean 'copy'"),
    ],
)
def test_wrong_requests_end_with_2_and_write_nothing(here, capsys, asked, says):
    assert command.main(["experiment", *asked.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("python -m atlib: ") and re.search(says, err)
    assert "Traceback" not in err and list(here.iterdir()) == []


@pytest.mark.parametrize(
    "asked",
    ["", "experimnt", "experiment", "experiment transfer --seeds five", "experiment transfer --sede 1"],
)
def test_requests_that_cannot_be_parsed(here, capsys, asked):
    with pytest.raises(SystemExit) as caught:
        command.main(asked.split())
    assert caught.value.code == 2 and "usage: python -m atlib" in capsys.readouterr().err
    assert list(here.iterdir()) == []


def test_help_names_experiments_scales_and_methods(capsys):
    with pytest.raises(SystemExit) as caught:
        command.main(["experiment", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert caught.value.code == 0
    assert all(
        name in text
        for name in (
            "transfer",
            "distillation",
            "built-in",
            "cifar10-cpu",
            "copy-fine-tuned",
            "--seeds",
            "--data",
            "--out",
        )
    )


@pytest.mark.slow
def test_the_process_ends_with_the_code(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "atlib", "experiment", "transfre"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert (
        done.returncode == 2 and "Did you mean 'transfer'" in done.stderr and "Traceback" not in done.stderr
    )
    assert list(tmp_path.iterdir()) == []
