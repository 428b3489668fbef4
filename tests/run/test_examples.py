"""The loops of `examples/`: each trains the student of a pair, leaves the teacher as it was, and is short."""

from importlib import import_module

import pytest
import torch

from atlib import AttentionTransfer
from tests.helpers import same, state_of

LOOPS = {"plain_loop": "torch", "with_trainer": "transformers", "with_lightning": "lightning"}


@pytest.mark.parametrize("name, library", LOOPS.items())
@pytest.mark.filterwarnings("ignore")  # of the frameworks, about workers and deprecations
def test_a_loop_trains_the_student_alone(name, library, monkeypatch, tmp_path):
    pytest.importorskip(library)
    example, built = import_module(f"examples.{name}"), []

    def build(*arguments, **options):
        pair = AttentionTransfer(*arguments, **options)
        built.append((pair, state_of(pair.student), state_of(pair.teacher)))
        return pair

    monkeypatch.setattr(example, "AttentionTransfer", build)
    monkeypatch.chdir(tmp_path)
    student = example.main(epochs=1)
    ((pair, first, teacher),) = built
    assert student is pair.student and same(state_of(pair.teacher), teacher)
    moved = [key for key, value in student.state_dict().items() if not torch.equal(value.cpu(), first[key])]
    assert len(moved) > 0.9 * len(first), "every part of the student learns"
    assert all(weight.isfinite().all() for weight in student.parameters())
    assert not [*tmp_path.iterdir()], "an example leaves nothing behind"
