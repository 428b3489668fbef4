"""What a run is put together from: how a student that pools otherwise than its teacher is treated."""

from types import SimpleNamespace

import pytest
import torch

from atlib.checkpoint import load_bundle, load_vit, save_bundle, save_vit
from atlib.plan import Plan
from atlib.recipe import Recipe
from atlib.vit import Architecture
from atrun.build import build
from atrun.classes import labels_by_name
from atrun.config import RunConfig
from atrun.data.transforms import Augmentation
from atrun.looking.file_preparation import augmentation_of
from tests.helpers import same

TINY = {"img_size": 32, "patch_size": 16, "depth": 2, "embed_dim": 24, "num_heads": 2}


def config(tmp_path, how="copy", plan=None, **student):
    """A run whose teacher reads its class token, and whose student has `student`'s constructor arguments."""
    teacher = Architecture("vit_tiny_patch16_224", {**TINY, "num_classes": 0})
    path = save_vit(tmp_path / "teacher.safetensors", teacher.build(), teacher)
    model, plan = Architecture("vit_tiny_patch16_224", TINY | student), plan or Plan(how=how)
    options = {"recipe_name": "mine", "data": "atbook.worlds:marked_glyphs", "recipe": Recipe()}
    return RunConfig(method=how, model=model, teacher=str(path), plan=plan, **options)


@pytest.mark.parametrize("how", ["copy", "distill"])
def test_a_student_that_only_pools_otherwise_is_taught(tmp_path, how):
    built = build(config(tmp_path, how, global_pool="avg"), 8)
    assert set(built.model.pairing.components) == {"pooling"}
    assert (built.model.plan.what, built.model.plan.how, built.model.plan.mismatched) == ("map", how, True)
    if how == "copy":  # what is kept can be read back as the same pair
        path = save_bundle(tmp_path / "student.safetensors", built.model, built.student, built.teacher)
        assert same(load_bundle(path).student.state_dict(), built.model.student.state_dict())


@pytest.mark.parametrize("student", [{"init_values": 0.1}, {"init_values": 0.1, "global_pool": "avg"}])
def test_any_other_difference_must_be_asked_for(tmp_path, student):
    with pytest.raises(ValueError, match="layer_scale"):
        build(config(tmp_path, **student), 8)
    asked = config(tmp_path, plan=Plan(mismatched=True), **student)
    assert "layer_scale" in build(asked, 8).model.pairing.components


def test_weights_say_how_images_are_prepared_for_them(tmp_path):
    architecture = Architecture("vit_tiny_patch16_224", TINY)
    vit = architecture.build()
    augmentation = Augmentation(32, crop_pct=1.0, mean=(0.1, 0.2, 0.3), std=(0.5,) * 3)
    described = {"image_size": 32, "crop_pct": 1.0, "mean": [0.1, 0.2, 0.3], "std": [0.5, 0.5, 0.5]}
    said = {
        name: save_vit(tmp_path / f"{name}.safetensors", vit, architecture, more)
        for name, more in (
            ("silent", {}),
            ("as they are", {"augmentation": None}),
            ("prepared", {"augmentation": described}),
            ("wrong", {"augmentation": {"crop_pct": 7}}),
        )
    }
    assert augmentation_of(said["silent"]) == (False, None)
    assert augmentation_of(said["as they are"]) == (True, None)
    assert augmentation_of(said["prepared"]) == (True, augmentation)
    assert same(load_vit(said["prepared"]).state_dict(), vit.state_dict())
    with pytest.raises(OSError, match="wrong.safetensors .*crop_pct"):
        augmentation_of(said["wrong"])


# --- Which label of other data is which output: by name where there are names, numbers too (vision#714)


NUMBERS = tuple(map(str, range(12)))
WORDS = ("cat", "dog", "owl")


def outputs_of(classes, own, outputs=None):
    """The output of each class of the data."""
    images = SimpleNamespace(classes=own, targets=torch.arange(len(own)))
    model = torch.nn.Module()
    model.num_classes = len(own) if outputs is None else outputs
    labels, said = labels_by_name(classes, model, images, "data", "student.safetensors")
    return labels.tolist(), said


@pytest.mark.parametrize(
    "classes, own, right",
    [
        (NUMBERS, tuple(sorted(NUMBERS)), [int(each) for each in sorted(NUMBERS)]),  # folders 0, 1, 10, 11, 2
        (NUMBERS, tuple(f"{number:03d}" for number in range(12)), list(range(12))),
        (("4", "7", "9"), ("9", "4"), [2, 0]),
        (WORDS, ("owl", "cat"), [2, 0]),
    ],
)
def test_classes_are_matched_by_name_numbers_too(classes, own, right):
    labels, said = outputs_of(classes, own, len(classes))
    assert labels == right and "by their names" in said


@pytest.mark.parametrize("classes, own", [(NUMBERS[:3], WORDS), (WORDS, NUMBERS[:3]), (None, WORDS)])
def test_where_one_side_has_no_names_place_counts_and_is_said(classes, own):
    assert outputs_of(classes, own) == ([0, 1, 2], outputs_of(classes, own)[1])
    assert "class k of the data" in outputs_of(classes, own)[1]


@pytest.mark.parametrize(
    "classes, own, named",
    [
        (NUMBERS, tuple(str(number + 1) for number in range(12)), "'12'"),  # counted from 1
        (None, tuple(sorted(NUMBERS)), "another order"),
        (None, WORDS, "3 classes"),
        (("1", "01"), ("1",), "two classes of this name"),
        (WORDS, ("1", "2", "4"), "'1', '2', '4'"),
        (("cafe\u0301", "dog"), ("caf\u00e9", "dog"), r"'caf\\xe9'.*'cafe\\u0301'"),
    ],
)
def test_what_cannot_be_matched_is_refused_by_name(classes, own, named):
    with pytest.raises(ValueError, match=named):
        outputs_of(classes, own, 12 if classes == NUMBERS or classes is None else len(classes))
