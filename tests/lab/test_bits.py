"""The study of binary students: what each is told, and that everything else is the same."""

import torch

from atbook.lab import study as runner
from atbook.lab.bits import BITS
from atbook.lab.study import run_study
from atbook.records import read_file
from atfamily.binary_vit import BinaryViT
from atlib import AttentionTransfer
from atlib.baselines import LogitDistillation
from atlib.checkpoint import load_vit
from atlib.pair import student_of
from tests.toy import sources as sources  # a fixture


def test_what_each_student_is_told(sources):
    teacher = load_vit(sources.place.teacher(0)).state_dict()
    for variant in BITS.variants:
        told, maps = variant.differs["told"], variant.differs["maps"]
        model = variant.build(sources)
        student = student_of(model)
        assert isinstance(student, BinaryViT) and student.num_prefix_tokens == 1
        shares = [block.attn.share for block in student.stages[0]]
        assert len(shares) == 4 and all((share is None) == (maps == "full") for share in shares)
        if told in ("distilled maps", "copied maps"):
            assert isinstance(model, AttentionTransfer)
            assert model.plan.how == ("copy" if told == "copied maps" else "distill")
            assert model.layers == (0, 1, 2, 3) and model.path == "map-free"
            # to distill, blocks that are not run are let go
            assert all(torch.equal(teacher[key], x) for key, x in model.teacher.state_dict().items())
        elif told == "predictions":
            assert isinstance(model, LogitDistillation) and not model.hard and model.temperature == 1
            assert model.teacher.num_classes == 8
            assert (variant.changes["task_weight"], variant.changes["transfer_weight"]) == (0, 1)
        else:
            assert model is student


def test_a_run_leaves_a_record_that_names_the_student(sources, monkeypatch):
    copied = runner.replace(BITS.variant("copied maps, one-bit maps"), like=None)
    small = runner.replace(BITS, variants=(copied,), only=())
    monkeypatch.setattr(type(copied), "choices", lambda self, scale: ({},))
    run_study(small, sources.place, seeds=1)
    (record,) = read_file(sources.place.records("bits"))
    assert record.config["recipe"]["student"] == "BinaryViT" and 0 <= record.results["test_accuracy"] <= 1
