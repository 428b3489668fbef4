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
def run(tmp_path_factory):
    """The folder of a run of Copy."""

    def make(folder):
        assert command.main(asked("find-copy", folder / "copy", "--teacher", TEACHER)) == 0

    return made_once(tmp_path_factory, "run-with-controls", make)[0] / "copy"


def test_maps_of_a_finished_student_are_switched(run, capsys):
    assert command.main(["controls", str(run)]) == 0
    config = read_config(run)
    rows = switched(load_result(weights_of(run)), held_out(config), training_images(config))
    assert capsys.readouterr().out.strip() == controls_table(rows)


def test_students_are_trained_under_each_control(run, capsys):
    assert command.main(["controls", str(run), "--train", "--seeds", "1"]) == 0
    table = capsys.readouterr().out.strip().splitlines()
    names = ["scratch", "own maps", "jigsaw", "mean map", "blank"]
    assert [line.split("|")[1].strip() for line in table[2:]] == names
