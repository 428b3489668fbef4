"""What a run is put together from: how a student that pools otherwise than its teacher is treated."""

import pytest

from atlib.checkpoint import Architecture, load_bundle, save_bundle, save_vit
from atlib.plan import Plan
from atlib.recipes import Recipe
from atlib.run import RunConfig
from atlib.run_parts import build
from tests.helpers import same

TINY = {"img_size": 32, "patch_size": 16, "depth": 2, "embed_dim": 24, "num_heads": 2}


def config(tmp_path, how="copy", plan=None, **student):
    """A run whose teacher reads its class token, and whose student has `student`'s constructor arguments."""
    teacher = Architecture("vit_tiny_patch16_224", {**TINY, "num_classes": 0})
    path = save_vit(tmp_path / "teacher.safetensors", teacher.build(), teacher)
    return RunConfig("mine", how, Architecture("vit_tiny_patch16_224", TINY | student), "marked-glyphs", Recipe(), teacher=str(path), plan=plan or Plan(how=how))


@pytest.mark.parametrize("how", ["copy", "distill"])
def test_a_student_that_only_pools_otherwise_is_taught(tmp_path, how):
    built = build(config(tmp_path, how, global_pool="avg"), 8)
    assert set(built.model.mismatched) == {"pooling"}
    assert (built.model.plan.what, built.model.plan.how, built.model.plan.mismatched) == ("map", how, True)
    if how == "copy":  # what is kept can be read back as the same pair
        again = load_bundle(save_bundle(tmp_path / "student.safetensors", built.model, built.student, built.teacher))
        assert same(again.student.state_dict(), built.model.student.state_dict())


def test_a_student_like_its_teacher_is_no_mismatch(tmp_path):
    assert build(config(tmp_path), 8).model.plan.mismatched is False


@pytest.mark.parametrize("student", [{"init_values": 0.1}, {"init_values": 0.1, "global_pool": "avg"}])
def test_any_other_difference_must_be_asked_for(tmp_path, student):
    with pytest.raises(ValueError, match="layer_scale"):
        build(config(tmp_path, **student), 8)
    assert "layer_scale" in build(config(tmp_path, plan=Plan(mismatched=True), **student), 8).model.mismatched
