"""The studies of chapters 16 to 19: one thing is different at a time, and it is the one that the name says."""

import math
from dataclasses import replace

import pytest
import torch

from atlib.checkpoint import load_vit
from atlib.data import glyphs
from atlib.lab import study as experiment
from atlib.lab.scales import scales
from atlib.lab.studies import (
    COMPONENT_STUDY,
    COMPONENTS,
    IMBALANCE,
    LONG_TAIL,
    POOL,
    PRETRAINING,
    SIZES,
    STUDIES,
    TEACHER_STUDIES,
    WITH_COMPONENT,
)
from atlib.lab.study import Place, Sources, run_study
from atlib.student import differences
from atlib.train import pretrain
from atlib.train import recipe as recipes
from atlib.vit import Architecture
from tests import toy
from tests.helpers import same

TEACHERS = [schooling for study in TEACHER_STUDIES for schooling in study.teachers]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = toy.place(tmp_path_factory.mktemp("models"))
    toy.untrained_models(place, TEACHERS)
    return place


@pytest.fixture
def build(place, monkeypatch):
    """A study's variant, built from untrained models; and the weights in a teacher's file."""
    monkeypatch.setattr(experiment, "scales", toy.known)

    def built(study, name):
        variant = study.variant(name)
        student = Architecture("glyphs", dict(variant.student))
        return variant.build(Sources(place, replace(toy.TOY, student=student), 0))

    return built


@pytest.fixture
def kept(place):
    return lambda name: load_vit(place.work / f"teacher-{name}-seed0.safetensors").state_dict()


def test_teachers_have_names_of_their_own():
    """A name is a file name: two ways of making a teacher under one name would be taken for each other."""
    names = [schooling.name for study in STUDIES.values() for schooling in study.teachers]
    assert len(set(names)) == len(names) and all(
        set(name) <= set("abcdefghijklmnopqrstuvwxyz-") for name in names
    )
    assert not any(name.startswith("seed") for name in names), (
        "nor is any taken for the central one, teacher-seed0"
    )


def test_teachers_have_half_of_the_central_ones_steps():
    for schooling in TEACHERS:
        recipe = replace(recipes.RETRIEVAL, **schooling.changes)
        assert recipe == replace(recipes.RETRIEVAL, steps=recipes.RETRIEVAL.steps // 2)


def test_teachers_differ_in_one_thing():
    by_name = {schooling.name: schooling for schooling in TEACHERS}
    assert set(by_name) == {
        "standard",
        "colour",
        "other-data",
        "small",
        "large",
        "layer-scale",
        "registers",
        "pre-norm",
        "average-pooling",
    }
    standard = by_name["standard"]
    for name, schooling in by_name.items():
        changed = {
            part
            for part in ("outputs", "images", "loss", "world", "model")
            if getattr(schooling, part) != getattr(standard, part)
        }
        assert changed == {
            "standard": set(),
            "colour": {"outputs", "images", "loss"},
            "other-data": {"world"},
        }.get(name, {"model"})
    assert by_name["other-data"].world == glyphs.World(rendering="inverted")
    assert (by_name["colour"].outputs, by_name["colour"].images) == (6, pretrain.colour_images)


# --- pre-training


@pytest.mark.parametrize(
    "weights, routing",
    [(weights, routing) for weights in ("useful", "useless") for routing in ("useful", "useless")],
)
def test_mix_and_match(build, kept, weights, routing):
    """Features are the weights a student starts from, routing the maps it is given: of the standard, the
    colour or an untrained teacher."""
    model = build(PRETRAINING, f"{weights} features, {routing} routing")
    expected = kept({"useful": "standard", "useless": "colour"}[weights])
    student = model.student.state_dict()
    assert all(
        torch.equal(student[name], value) for name, value in expected.items() if not name.startswith("head")
    )
    assert model.student.head.out_features == 8 and all(
        parameter.requires_grad for parameter in model.student.parameters()
    )
    assert model.plan.how == "copy" and model.plan.what == "map"
    if routing == "useful":
        assert same(model.teacher.state_dict(), kept("standard"))
    else:
        used = [kept(name)["blocks.0.attn.qkv.weight"] for name in ("standard", "colour")] + [
            student["blocks.0.attn.qkv.weight"]
        ]
        assert not any(
            torch.equal(model.teacher.state_dict()["blocks.0.attn.qkv.weight"], other) for other in used
        )


@pytest.mark.parametrize("name", ["standard", "colour", "other data"])
def test_methods_take_the_teacher_that_they_name(build, kept, name):
    expected = kept(name.replace(" ", "-"))
    tuned = build(PRETRAINING, f"{name}, fine-tune").state_dict()
    assert all(
        torch.equal(tuned[key], value) for key, value in expected.items() if not key.startswith("head")
    )
    for how in ("copy", "distill"):
        model = build(PRETRAINING, f"{name}, {how}")
        assert (
            same(model.teacher.state_dict(), expected)
            and model.plan.how == how == PRETRAINING.variant(f"{name}, {how}").like
        )


# --- imbalanced labels


@pytest.mark.parametrize("labels", [400, 1000])
def test_the_long_tail_by_counting(labels):
    scale = replace(scales()["built-in"], labels=labels)
    drawn = glyphs.generate("train", 4 * labels, 3)
    images = LONG_TAIL.variant("copy").images(scale, 3)
    before, after = (
        [labels.tolist().count(label) for label in range(8)] for labels in (drawn.shape, images.targets)
    )
    assert after == [
        min(before[label], math.floor(before[0] / IMBALANCE ** (label / 7) + 1e-9)) for label in range(8)
    ]
    assert after[0] == before[0] and after[7] == before[0] // 50
    all_of_them = {image.tobytes() for image in drawn.images}
    assert {image.numpy().tobytes() for image in images.pixels} <= all_of_them
    if labels == 1000:
        assert 1000 <= len(images) <= 1300, "about as many as the balanced ones"


def test_every_method_gets_the_same_imbalanced_images():
    assert (
        [variant.name for variant in LONG_TAIL.variants]
        == ["scratch", "fine-tune", "copy", "distill"]
        == [v.like for v in LONG_TAIL.variants]
    )
    assert len({variant.images for variant in LONG_TAIL.variants}) == 1


# --- components


@pytest.mark.parametrize("name", COMPONENTS)
def test_a_teacher_has_one_component_more_and_a_matched_student_has_it_too(build, name):
    standard, teacher = (Architecture("glyphs", model).build() for model in ({}, WITH_COMPONENT[name].model))
    component = {
        "layer scale": "layer_scale",
        "registers": "registers",
        "pre-norm": "pre_norm",
        "average pooling": "pooling",
    }[name]
    assert set(differences(teacher, standard)) == {component}
    for how in ("copy", "distill"):
        matched, other = (
            build(COMPONENT_STUDY, f"{name}, {how} to {which}") for which in ("matched", "standard")
        )
        assert differences(matched.teacher, matched.student) == matched.mismatched == {}
        assert set(differences(other.teacher, other.student)) == {component}
        assert differences(matched.student, teacher) == {} and differences(other.student, standard) == {}
        assert matched.plan.how == other.plan.how == how
    assert differences(build(COMPONENT_STUDY, f"{name}, scratch"), teacher) == {}, (
        "the floor has the component too"
    )


def test_layer_scale_starts_at_cait_s_value():
    vit = Architecture("glyphs", WITH_COMPONENT["layer scale"].model).build()
    assert all((block.ls1.gamma == 0.1).all() and (block.ls2.gamma == 0.1).all() for block in vit.blocks)


# --- sizes and the pool

WIDTHS = {"small": 32, "large": 96}


@pytest.mark.parametrize("name", [variant.name for variant in SIZES.variants])
def test_widths_are_those_of_the_name(build, name):
    of_teacher, of_student = (
        (name.split()[0], name.split()[2]) if "teacher" in name else (name.split(",")[0],) * 2
    )
    model = build(SIZES, name)
    student = getattr(model, "student", model)
    assert (
        student.embed_dim == WIDTHS[of_student]
        and len(student.blocks) == 4
        and student.blocks[0].attn.num_heads == 4
    )
    assert (
        (model.teacher.embed_dim == WIDTHS[of_teacher])
        if hasattr(model, "teacher")
        else name.endswith(("scratch", "fine-tune"))
    )


def test_sizes_cross_both_ways():
    assert {name for variant in SIZES.variants if "teacher" in (name := variant.name)} == {
        f"{teacher} teacher, {student} student, {how}"
        for teacher, student in (("small", "large"), ("large", "small"))
        for how in ("copy", "distill")
    }


def test_the_pool_is_trained_from_scratch_only():
    assert POOL.teachers == () and all(variant.like == "scratch" for variant in POOL.variants)
    for variant in POOL.variants:
        if variant.stop_at:
            continue
        assert [variant.labels or 1000, variant.changes.get("steps", 400)] == {
            "250 labels": [250, 400],
            "500 labels": [500, 400],
            "2000 labels": [2000, 400],
            "4000 labels": [4000, 400],
            "100 steps": [1000, 100],
            "200 steps": [1000, 200],
            "8000 labels, 800 steps": [8000, 800],
            "narrow": [1000, 400],
            "wide": [1000, 400],
        }[variant.name]


def test_those_with_teachers_and_sizes_of_their_own_are_made_for_the_built_in_world(tmp_path):
    assert all(STUDIES[study.name] is study for study in TEACHER_STUDIES)
    assert {study.name for study in TEACHER_STUDIES if study.only != "built-in"} == {"long-tail"}
    with pytest.raises(ValueError, match="sizes is made for the scale 'built-in'"):
        run_study(SIZES, Place("cifar10", None, tmp_path, tmp_path), tmp_path, seeds=1)


def test_checkpoints_of_the_pool_lie_along_its_longest_run():
    longest = POOL.variant("8000 labels, 800 steps")
    along = [variant for variant in POOL.variants if variant.stop_at]
    assert len(along) >= 3 and all(0 < variant.stop_at < 800 for variant in along)
    for variant in along:
        assert (variant.changes, variant.labels, variant.student) == (
            longest.changes,
            longest.labels,
            longest.student,
        )
