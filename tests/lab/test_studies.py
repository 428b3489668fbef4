"""The book's studies: one thing is different at a time, and it is the one that the name says."""

import math
import pickle
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch

from atlib import AttentionTransfer, Plan
from atlib.checkpoint import load_vit
from atlib.data import glyphs
from atlib.data.rng import seed_for
from atlib.lab import study as runner
from atlib.lab.scales import RETRIEVAL, Schooling, colour, scales
from atlib.lab.studies import (
    AVERAGES,
    COMPONENT_STUDY,
    COMPONENTS,
    DISTILLATION,
    FAMILY,
    FIND,
    IMBALANCE,
    LABEL_CURVES,
    LAYERS,
    LONG_TAIL,
    LONGER_LABEL_CURVES,
    PAIRS,
    POOL,
    PRETRAINING,
    SIZES,
    STUDIES,
    WITH_COMPONENT,
    WORLDS,
)
from atlib.lab.study import CENTRAL, Sources, again, by, fine_tune, pair, scratch, untrained_maps
from atlib.student import describe, differences
from atlib.train import pretrain
from atlib.train import recipe as recipes
from atlib.vit import Architecture
from tests import toy
from tests.helpers import same

EVERY = [(study, variant) for study in (CENTRAL, *STUDIES.values()) for variant in study.variants]
TEACHERS = {each.name: each for study in STUDIES.values() for each in study.teachers}
COLOUR = TEACHERS["colour"]
BODY = "blocks.2.mlp.fc1.weight"


@pytest.fixture(autouse=True)
def toy_scales(monkeypatch):
    monkeypatch.setattr(runner, "scales", toy.known)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Untrained models for every source of every study."""
    place = toy.place(tmp_path_factory.mktemp("models"))
    toy.untrained_models(place, TEACHERS.values())
    return place


@pytest.fixture
def sources(place):
    return Sources(place, toy.TOY, 0)


@pytest.fixture
def build(sources):
    """A study's variant, built from untrained models."""

    def built(study, name):
        variant = study.variant(name)
        scale = replace(toy.TOY, student=Architecture("glyphs", dict(variant.student)), unlabelled=400)
        return variant.build(sources._replace(scale=scale))

    return built


@pytest.fixture
def kept(place):
    """The weights in a teacher's file: the central one's or another's."""
    return lambda name=None: load_vit(place.teacher(0, TEACHERS.get(name))).state_dict()


def fresh(seed, again=0):
    torch.manual_seed(seed_for(seed, "student", again))
    return Architecture("glyphs").build().state_dict()


def without_head(state):
    return {name: value for name, value in state.items() if not name.startswith("head")}


# --- What studies are made of


@pytest.mark.parametrize("schooling, outputs", [(None, 192), (COLOUR, 6)])
def test_fine_tune_has_the_teachers_body_and_a_new_head(sources, kept, schooling, outputs):
    expected = kept(schooling and schooling.name)
    teacher, student = sources.teacher(schooling), fine_tune(sources, schooling)
    assert same(teacher.state_dict(), expected) and teacher.head.out_features == outputs
    assert same(without_head(student.state_dict()), without_head(expected))
    assert student.head.out_features == 8 and all(each.requires_grad for each in student.parameters())
    torch.manual_seed(99)  # what was drawn before does not matter
    assert same(fine_tune(sources, schooling).state_dict(), student.state_dict())


def test_a_pair_is_a_new_student_beside_its_teacher(sources, kept):
    plan = Plan("q", "distill", layers=[1])
    for schooling in (None, COLOUR):
        model = pair(plan, sources, schooling)
        assert isinstance(model, AttentionTransfer) and model.plan is plan
        # Distill holds the teacher's blocks that run: here the first two.
        held = model.teacher.state_dict()
        assert len(model.teacher.blocks) == 2
        assert same(held, {name: kept(schooling and schooling.name)[name] for name in held})
        assert same(model.student.state_dict(), fresh(0))
    model = by("q", "distill", COLOUR, layers=[1])(sources)
    assert model.plan == plan and same(
        model.teacher.state_dict(), {name: kept("colour")[name] for name in held}
    )
    with pytest.raises(ValueError, match="'copies'"):  # when the study is written, not when it is run
        by(how="copies")


def test_untrained_maps_belong_to_no_model_that_is_at_hand(sources, kept):
    model = untrained_maps(sources)
    assert same(model.student.state_dict(), fresh(0)) and model.plan == Plan()
    for other in (fresh(0), kept()):
        assert not torch.equal(model.teacher.state_dict()[BODY], other[BODY])
    assert same(untrained_maps(sources).teacher.state_dict(), model.teacher.state_dict()), "the seed decides"
    tuned = untrained_maps(sources, fine_tune(sources))
    assert torch.equal(tuned.student.state_dict()[BODY], kept()[BODY])


@pytest.mark.parametrize("build", [scratch, fine_tune, by()], ids=["scratch", "fine-tune", "copy"])
def test_again_is_the_same_teacher_and_other_first_weights(sources, kept, build):
    """What is drawn anew: a student's weights, or, where it has the teacher's, its head."""
    first, second, third = build(sources), again(build, sources), again(build, sources)
    students = [getattr(model, "student", model).state_dict() for model in (first, second, third)]
    assert same(students[1], students[2])
    assert not torch.equal(students[0]["head.weight"], students[1]["head.weight"])
    if build is fine_tune:
        assert all(same(without_head(student), without_head(kept())) for student in students)
    else:
        assert same(students[1], fresh(0, again=1)) and not torch.equal(students[0][BODY], students[1][BODY])
    if hasattr(first, "teacher"):
        assert same(second.teacher.state_dict(), kept())


def test_again_is_no_other_seed(sources):
    """The first weights of repeated runs must not be those of a reported seed or of the tuning's."""
    weights = [
        scratch(sources._replace(seed=seed, again=again)).state_dict()[BODY].sum().item()
        for seed, again in [*((seed, 1) for seed in range(3)), *((seed, 0) for seed in (0, 1, 2, 3, 4, 100))]
    ]
    assert len(set(weights)) == 9


def test_builders_travel_to_other_processes(sources):
    for build in (partial(fine_tune, schooling=COLOUR), by(how="distill", schooling=COLOUR)):
        model, twin = build(sources), pickle.loads(pickle.dumps(partial(again, build)))(sources)
        assert same(again(build, sources).state_dict(), twin.state_dict())
        assert not same(model.state_dict(), twin.state_dict())
    assert [variant.name for _, variant in pickle.loads(pickle.dumps(EVERY))] == [v.name for _, v in EVERY]


def test_a_teacher_that_was_not_made_is_named(sources):
    with pytest.raises(FileNotFoundError, match="teacher-other-seed0.safetensors"):
        fine_tune(sources, Schooling("other"))


# --- All studies


def test_names_are_distinct_and_recipes_valid():
    for study in STUDIES.values():
        scale = scales()[study.only[0] if study.only else "find"]
        names = [variant.name for variant in study.variants]
        assert len(set(names)) == len(names) and study.seeds >= 3
        for variant in study.variants:
            assert variant.like in scale.tuning
            for trial in variant.trials or ({},):
                scale.recipe(variant.changes | trial)  # raises where a value cannot be meant


@pytest.mark.parametrize(
    "study, steps, numbers",
    [(LABEL_CURVES, 500, [250, 4000, 32_000]), (LONGER_LABEL_CURVES, 2000, [4000, 32_000])],
)
def test_label_curves_give_all_methods_the_same_steps(study, steps, numbers):
    assert {variant.changes["steps"] for variant in study.variants} == {steps}
    for method in ("scratch", "copy", "copy-routing-twin", "fine-tune"):
        variants = [variant for variant in study.variants if variant.like == method]
        assert [variant.labels for variant in variants] == numbers
        assert {variant.twin for variant in variants} == {"routing" if "twin" in method else None}


def test_the_sweep_over_weights_has_every_weight_that_can_be_chosen():
    weights = {v.changes["transfer_weight"] for v in DISTILLATION.variants}
    for name in DISTILLATION.only:
        assert {recipe["transfer_weight"] for recipe in scales()[name].tuning["distill"]} <= weights


def built_of(student):
    """What a student is built of, by the names of timm's constructor."""
    layer_scale = getattr(student.blocks[0].ls1, "gamma", None)
    return {
        "num_heads": student.blocks[0].attn.num_heads,
        "depth": len(student.blocks),
        "embed_dim": student.embed_dim,
        "patch_size": student.patch_embed.patch_size[0],
        "init_values": None if layer_scale is None else pytest.approx(layer_scale[0].item()),
        "reg_tokens": describe(student)["registers"],
        "pre_norm": describe(student)["pre_norm"],
        "global_pool": student.global_pool,
    }


@pytest.mark.parametrize("study, variant", EVERY, ids=[f"{study.name} {v.name}" for study, v in EVERY])
def test_every_variant_is_built_of_what_it_names_and_trains_one_step(build, study, variant):
    asked, needed = [], set()

    class Watched(Sources):
        def teacher(self, schooling=None):
            asked.append(schooling)
            return super().teacher(schooling)

        def fine_tuned(self):
            needed.add("fine-tuned")
            return super().fine_tuned()

        def another_teacher(self):
            needed.add("another teacher")
            return super().another_teacher()

    plain = variant.build
    watched = replace(variant, build=lambda sources: plain(Watched(*sources)))
    model = build(replace(study, variants=(watched,)), variant.name).train()
    assert needed == set(variant.needs)
    assert all(each is None or each in study.teachers for each in asked), "it makes those that it needs"
    output = model(torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0)))
    logits = output if isinstance(output, torch.Tensor) else output.logits
    assert logits.shape == (4, 8) and logits.isfinite().all()
    logits.sum().backward()
    found = built_of(getattr(model, "student", model))
    assert {name: found[name] for name in variant.student} == variant.student


def test_plans_are_what_their_names_say(build):
    for study, name, expected in (
        (LAYERS, "distill first 2", {"layers": (0, 1), "how": "distill"}),
        (LAYERS, "distill last 1", {"layers": (3,)}),
        (LAYERS, "copy first 3", {"layers": (0, 1, 2), "how": "copy"}),
        (LAYERS, "distill last 3", {"layers": (1, 2, 3), "how": "distill"}),
        (LAYERS, "copy heads 2", {"heads": (0, 1), "how": "copy"}),
        (AVERAGES, "copy mean of queries", {"average": "queries"}),
        (PAIRS, "two heads, distill learn", {"unequal_heads": "learn"}),
        (PAIRS, "shallow, copy last layers", {"layers": ((0, 2), (1, 3))}),
    ):
        plan = build(study, name).plan
        assert {field: getattr(plan, field) for field in expected} == expected, name


def test_copying_into_another_teachers_weights(build, sources):
    model = build(FAMILY, "copy into another teacher's weights")
    weights = [vit.state_dict() for vit in (model.student, sources.another_teacher(), sources.teacher())]
    assert torch.equal(weights[0][BODY], weights[1][BODY]) and not torch.equal(
        weights[0][BODY], weights[2][BODY]
    )
    assert all(each.requires_grad for each in model.student.parameters())
    assert model.student.head.out_features == 8


# --- Teachers


def test_teachers_have_names_and_recipes_of_their_own():
    """A name is a file name: two ways of making a teacher under one name would be taken for each other."""
    names = [schooling.name for study in STUDIES.values() for schooling in study.teachers]
    assert len(set(names)) == len(names)
    for name, schooling in TEACHERS.items():
        assert set(name) <= set("abcdefghijklmnopqrstuvwxyz-")
        assert not name.startswith("seed"), "nor is any taken for the central one, teacher-seed0"
        recipe = replace(recipes.RETRIEVAL, **schooling.changes)
        # the central ones' steps, but where the task is harder
        steps = 3000 if name == "pointer" else recipes.RETRIEVAL.steps
        assert recipe == replace(recipes.RETRIEVAL, steps=steps)


def test_teachers_differ_in_one_thing():
    parts = ("outputs", "images", "loss", "world", "model")
    assert len(TEACHERS) == 6 and RETRIEVAL.model == {}
    for name, schooling in TEACHERS.items():
        changed = {part for part in parts if getattr(schooling, part) != getattr(RETRIEVAL, part)}
        assert changed == {"colour": {"outputs", "images", "loss"}, "pointer": {"world"}}.get(name, {"model"})
    assert TEACHERS["pointer"].world == glyphs.World(pointer=1)
    assert (
        (COLOUR.outputs, COLOUR.images)
        == (6, pretrain.colour_images)
        == (colour("c").outputs, colour("c").images)
    )


# --- Pre-training


@pytest.mark.parametrize("weights", ["useful", "useless"])
@pytest.mark.parametrize("routing", ["useful", "useless"])
def test_mix_and_match(build, kept, weights, routing):
    """Features are the weights a student starts from, routing the maps it is given: of the central, the
    colour or an untrained teacher."""
    model = build(PRETRAINING, f"{weights} features, {routing} routing")
    student = model.student.state_dict()
    assert same(without_head(student), without_head(kept({"useful": None, "useless": "colour"}[weights])))
    assert model.student.head.out_features == 8 and all(p.requires_grad for p in model.student.parameters())
    assert model.plan == Plan()
    if routing == "useful":
        assert same(model.teacher.state_dict(), kept(None))
    else:
        for other in (kept(None), kept("colour"), student):
            assert not torch.equal(model.teacher.state_dict()[BODY], other[BODY])


def test_methods_take_the_teacher_that_they_name(build, kept):
    expected = kept("colour")
    tuned = build(PRETRAINING, "colour, fine-tune").state_dict()
    assert same(without_head(tuned), without_head(expected))
    for how in ("copy", "distill"):
        model = build(PRETRAINING, f"colour, {how}")
        assert same(model.teacher.state_dict(), expected)
        assert model.plan.how == how == PRETRAINING.variant(f"colour, {how}").like


# --- Imbalanced labels


@pytest.mark.parametrize("labels", [400, 1000])
def test_the_long_tail_by_counting(labels):
    scale = replace(scales()["find"], labels=labels)
    drawn = glyphs.generate("train", 4 * labels, 3)
    images = LONG_TAIL.variant("copy").images(scale, 3)
    before, after = Counter(drawn.shape.tolist()), Counter(images.targets.tolist())
    for label in range(8):
        share = math.floor(before[0] / IMBALANCE ** (label / 7) + 1e-9)
        assert after[label] == min(before[label], share)
    assert after[0] == before[0] and after[7] == before[0] // 50
    all_of_them = {image.tobytes() for image in drawn.images}
    assert {image.numpy().tobytes() for image in images.pixels} <= all_of_them
    if labels == 1000:
        assert 1000 <= len(images) <= 1300, "about as many as the balanced ones"


def test_every_method_gets_the_same_imbalanced_images():
    methods = ["scratch", "fine-tune", "copy", "distill"]
    assert [v.name for v in LONG_TAIL.variants] == methods == [v.like for v in LONG_TAIL.variants]
    assert len({variant.images for variant in LONG_TAIL.variants}) == 1


# --- Components


@pytest.mark.parametrize("name", COMPONENTS)
def test_a_teacher_has_one_component_more_and_a_matched_student_has_it_too(build, name):
    standard, teacher = (Architecture("glyphs", model).build() for model in ({}, WITH_COMPONENT[name].model))
    component = {"average pooling": "pooling"}.get(name, name)
    assert set(differences(teacher, standard)) == {component}
    matched, other = (build(COMPONENT_STUDY, f"{name}, copy to {to}") for to in ("matched", "standard"))
    assert differences(matched.teacher, matched.student) == matched.mismatched == {}
    assert set(differences(other.teacher, other.student)) == {component}
    assert differences(matched.student, teacher) == {} and differences(other.student, standard) == {}
    assert matched.plan.how == other.plan.how == "copy"
    assert differences(build(COMPONENT_STUDY, f"{name}, scratch"), teacher) == {}, "so has the floor"


# --- Sizes and the pool


@pytest.mark.parametrize("name", [variant.name for variant in SIZES.variants])
def test_widths_are_those_of_the_name(build, name):
    widths = {"small": 32, "large": 96}
    words = name.replace(",", "").split()
    of_teacher, of_student = (words[0], words[2]) if "teacher" in name else (words[0], words[0])
    model = build(SIZES, name)
    student = getattr(model, "student", model)
    assert student.embed_dim == widths[of_student]
    assert len(student.blocks) == 4 and student.blocks[0].attn.num_heads == 4
    if hasattr(model, "teacher"):
        assert model.teacher.embed_dim == widths[of_teacher]
    else:
        assert name.endswith(("scratch", "fine-tune"))


def test_the_pool_is_trained_from_scratch_only():
    assert POOL.teachers == () and all(variant.like == "scratch" for variant in POOL.variants)
    for variant in POOL.variants:
        labels, steps = 1000, 500
        for part in variant.name.split(", "):
            if part.endswith((" labels", " steps")):
                number, what = part.split()
                labels, steps = (int(number), steps) if what == "labels" else (labels, int(number))
        if not variant.stop_at:
            assert (variant.labels or 1000, variant.changes.get("steps", 500)) == (labels, steps), (
                variant.name
            )


def test_checkpoints_of_the_pool_lie_along_its_longest_run():
    longest = POOL.variant("8000 labels, 1000 steps")
    along = [variant for variant in POOL.variants if variant.stop_at]
    assert len(along) == 1 and all(0 < variant.stop_at < 1000 for variant in along)
    for variant in along:
        assert replace(variant, name=longest.name, stop_at=None) == longest


def test_which_are_for_photographs_too_for_both_worlds_and_for_find_alone():
    places = (), WORLDS, FIND, ("match",)
    of = {only: {name for name, study in STUDIES.items() if study.only == only} for only in places}
    assert of[()] == {"long-tail"} and of[WORLDS] == {"labels", "distillation", "family", "layers"}
    assert sum(map(len, of.values())) == len(STUDIES)
