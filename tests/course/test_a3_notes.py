"""What a teacher is told of a student's report of A3."""

import shutil

import pytest

from atbook.records import records_file
from course.a3.cases import without_each_fault


def test_a_report_without_each_of_its_faults(tmp_path):
    """The numbers that the model answer has typed."""
    for study in ("shifts", "shifts-pool"):
        shutil.copy(records_file(study, "find"), tmp_path / f"{study}.jsonl")
    found = without_each_fault("cue@3", ("copy", "fine-tune"), tmp_path)
    typed = {"mean of the runs": 7.1, "logit axes": 7.1}
    typed |= {"without the judged runs": 12.4, "without guessing runs": 10.4}
    assert found == pytest.approx(typed, abs=0.06)
