"""`python -m atlib controls`: a table of a run's controls."""

import pytest

from atfamily.measures.controls import controls_table, switched
from atrun import __main__ as command
from atrun.build import held_out, training_images
from atrun.config import read_config
from atrun.runner import load_result, weights_of
from tests.helpers import made_once
from tests.stopped_runs import asked
from tests.stopped_runs import few_held_out as few_held_out  # a fixture

TEACHER = "results/transfer/find/teacher-seed0.safetensors"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs, of Copy and of Distill."""

    def make(folder):
        for method in ("copy", "distill"):
            assert command.main(asked(f"find-{method}", folder / method, "--teacher", TEACHER)) == 0

    return made_once(tmp_path_factory, "runs-with-controls", make)[0]


def test_maps_of_a_finished_student_are_switched(runs, capsys):
    assert command.main(["controls", str(runs / "copy")]) == 0
    config = read_config(runs / "copy")
    rows = switched(load_result(weights_of(runs / "copy")), held_out(config), training_images(config))
    assert capsys.readouterr().out.strip() == controls_table(rows)


def test_students_are_trained_under_each_control(runs, capsys):
    for method, names in (
        ("copy", ["scratch", "own maps", "jigsaw", "mean map", "blank"]),
        ("distill", ["scratch", "own maps", "jigsaw", "mean map"]),
    ):
        assert command.main(["controls", str(runs / method), "--train", "--seeds", "1"]) == 0
        table = capsys.readouterr().out.strip().splitlines()
        assert [line.split("|")[1].strip() for line in table[2:]] == names
