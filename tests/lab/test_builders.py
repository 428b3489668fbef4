"""What studies are made of: which weights a student starts from, and which teacher it gets."""

import pickle
from functools import partial

import pytest
import torch

from atlib import AttentionTransfer, Plan
from atlib.checkpoint import load_vit
from atlib.lab import study as experiment
from atlib.lab.scales import Schooling, colour
from atlib.lab.study import (
    AGAIN,
    Sources,
    again,
    by,
    fine_tune,
    pair,
    scratch,
    teacher_of,
    untrained_maps,
    with_new_head,
)
from atlib.vit import Architecture
from tests import toy
from tests.helpers import same

COLOUR = colour("colour")
BODY = "blocks.2.mlp.fc1.weight"


@pytest.fixture(autouse=True)
def toy_scales(monkeypatch):
    monkeypatch.setattr(experiment, "scales", toy.known)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = toy.place(tmp_path_factory.mktemp("models"))
    toy.untrained_models(place, [COLOUR])
    return place


@pytest.fixture
def sources(place):
    return Sources(place, toy.TOY, 0)


@pytest.fixture
def kept(place):
    """The weights in a teacher's file."""
    return lambda name: load_vit(place.work / f"{name}.safetensors").state_dict()


def fresh(seed):
    torch.manual_seed(seed)
    return Architecture("glyphs").build().state_dict()


def without_head(state):
    return {name: value for name, value in state.items() if not name.startswith("head")}


def test_scratch_is_what_the_seed_gives(sources):
    assert same(scratch(sources).state_dict(), fresh(0))
    assert same(scratch(sources._replace(seed=3)).state_dict(), fresh(3))


@pytest.mark.parametrize(
    "schooling, name, outputs", [(None, "teacher-seed0", 192), (COLOUR, "teacher-colour-seed0", 6)]
)
def test_fine_tune_has_the_teachers_body_and_a_new_head(sources, kept, schooling, name, outputs):
    teacher, student = teacher_of(sources, schooling), fine_tune(sources, schooling)
    assert same(teacher.state_dict(), kept(name)) and teacher.head.out_features == outputs
    assert (
        same(without_head(student.state_dict()), without_head(kept(name))) and student.head.out_features == 8
    )
    assert all(parameter.requires_grad for parameter in student.parameters())
    torch.manual_seed(99)  # what was drawn before does not matter
    assert same(fine_tune(sources, schooling).state_dict(), student.state_dict())


def test_a_frozen_teacher_is_fine_tuned_whole(sources):
    frozen = sources.teacher().requires_grad_(False)
    assert all(parameter.requires_grad for parameter in with_new_head(frozen, sources).parameters())


def test_a_pair_is_a_new_student_beside_its_teacher(sources, kept):
    plan = Plan("q", "distill", layers=[1])
    for schooling, name in ((None, "teacher-seed0"), (COLOUR, "teacher-colour-seed0")):
        model = pair(plan, sources, schooling)
        assert isinstance(model, AttentionTransfer) and model.plan is plan
        assert same(model.teacher.state_dict(), kept(name)) and same(model.student.state_dict(), fresh(0))
    build = by("q", "distill", COLOUR, layers=[1])
    assert build(sources).plan == plan and same(
        build(sources).teacher.state_dict(), kept("teacher-colour-seed0")
    )
    assert by()(sources).plan == Plan()
    with pytest.raises(
        ValueError, match="unknown how 'copies'"
    ):  # when the study is written, not when it is run
        by(how="copies")


def test_untrained_maps_belong_to_no_model_that_is_at_hand(sources, kept):
    model = untrained_maps(sources)
    assert same(model.student.state_dict(), fresh(0)) and model.plan == Plan()
    for other in (fresh(0), kept("teacher-seed0")):
        assert not torch.equal(model.teacher.state_dict()[BODY], other[BODY])
    assert same(untrained_maps(sources).teacher.state_dict(), model.teacher.state_dict()), (
        "the seed decides them"
    )
    tuned = untrained_maps(sources, fine_tune(sources))
    assert torch.equal(tuned.student.state_dict()[BODY], kept("teacher-seed0")[BODY])


@pytest.mark.parametrize(
    "build", [scratch, fine_tune, by(), by(how="distill")], ids=["scratch", "fine-tune", "copy", "distill"]
)
def test_again_is_the_same_teacher_and_other_first_weights(sources, kept, build):
    """What is drawn anew: a student's weights, or, where it has the teacher's, its head."""
    first, second, third = build(sources), again(build, sources), again(build, sources)
    students = [getattr(model, "student", model).state_dict() for model in (first, second, third)]
    assert same(students[1], students[2]) and not torch.equal(
        students[0]["head.weight"], students[1]["head.weight"]
    )
    if build is fine_tune:
        assert all(same(without_head(student), without_head(kept("teacher-seed0"))) for student in students)
    else:
        assert same(students[1], fresh(AGAIN)) and not torch.equal(students[0][BODY], students[1][BODY])
    for model in (first, second) if hasattr(first, "teacher") else ():
        assert same(model.teacher.state_dict(), kept("teacher-seed0"))


def test_again_is_no_other_seed(sources):
    """The first weights of repeated runs must not be those of a reported seed or of the tuning's."""
    repeated = {seed: scratch(sources._replace(seed=seed, again=1)).state_dict()[BODY] for seed in range(3)}
    others = [scratch(sources._replace(seed=seed)).state_dict()[BODY] for seed in (0, 1, 2, 3, 4, 100)]
    assert not any(torch.equal(weights, other) for weights in repeated.values() for other in others)
    assert len({weights.sum().item() for weights in repeated.values()}) == 3


def test_builders_travel_to_other_processes(sources):
    for build in (
        scratch,
        partial(fine_tune, schooling=COLOUR),
        by(how="distill", schooling=COLOUR),
        partial(again, by()),
    ):
        model, twin = build(sources), pickle.loads(pickle.dumps(build))(sources)
        assert same(model.state_dict(), twin.state_dict())


def test_a_teacher_that_was_not_made_is_named(sources):
    with pytest.raises(FileNotFoundError, match="teacher-other-seed0.safetensors does not exist"):
        fine_tune(sources, Schooling("other"))
