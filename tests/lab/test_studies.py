"""The book's studies: one thing is different at a time, and it is the one that the name says."""

import math
import pickle
from collections import Counter
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from timm.layers import Mlp
from timm.models.deit import VisionTransformerDistilled

from atbook.lab import study as runner
from atbook.lab.scales import scales
from atbook.lab.studies import DISTILLED_MAE, IMBALANCE, LONG_TAIL, PRETRAINING, STATIC, STUDIES, TOKEN
from atbook.lab.study import CENTRAL, Sources, again, built_on, by, fine_tune, scratch
from atbook.records import read_file
from atbook.worlds import glyphs
from atfamily.grafit import Grafit
from atfamily.resmlp import mean_patch_maps, static_maps
from atlib import Plan
from atlib.baselines import LogitDistillation
from atlib.checkpoint import load_vit, save_weights
from atlib.compatibility import describe
from atlib.loading import seed_for
from atlib.pair import student_of
from atlib.vit import Architecture
from tests import toy
from tests.helpers import randomise, same

EVERY = [
    (study, variant)
    for study in (CENTRAL, *STUDIES.values())
    if study.name != "mosaics"  # which has a world, and a test, of its own
    for variant in study.variants
]
# One of those that are built alike: of them the recipe or the number of labels differs.
BUILT = {(pickle.dumps(v.build), str(v.student), v.needs): (study, v) for study, v in reversed(EVERY)}
TEACHERS = {schooling.name: schooling for study in STUDIES.values() for schooling in study.teachers}
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
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "scales", toy.known)
        for study in STUDIES.values():
            for needed in study.needed_by(study.variants):
                scale = replace(toy.TOY, student=Architecture("glyphs", dict(needed.student)))
                model = randomise(needed.build(Sources(place, scale, 0)), 20)
                save_weights(built_on(study, place, needed.name, 0).weights, student_of(model))
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
    assert student.head.out_features == 8 and all(
        parameter.requires_grad for parameter in student.parameters()
    )
    torch.manual_seed(99)  # what was drawn before does not matter
    assert same(fine_tune(sources, schooling).state_dict(), student.state_dict())


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


# --- All studies


def built_of(student):
    """What a student is built of, by the names of timm's constructor."""
    layer_scale = getattr(student.blocks[0].ls1, "gamma", None)
    return {
        "num_heads": student.blocks[0].attn.num_heads,
        "depth": len(student.blocks),
        "embed_dim": student.embed_dim,
        "num_classes": student.num_classes,
        "patch_size": student.patch_embed.patch_size[0],
        "init_values": None if layer_scale is None else pytest.approx(layer_scale[0].item()),
        "reg_tokens": describe(student)["registers"],
        "pre_norm": describe(student)["pre_norm"],
        "drop_path_rate": pytest.approx(getattr(student.blocks[-1].drop_path1, "drop_prob", 0.0)),
        "global_pool": student.global_pool,
        "distilled": isinstance(student, VisionTransformerDistilled),
    }


@pytest.mark.parametrize(
    "study, variant", BUILT.values(), ids=[f"{s.name} {v.name}" for s, v in BUILT.values()]
)
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

        def model_of(self, study, method):
            needed.add(method)
            return super().model_of(study, method)

    plain = variant.build
    watched = replace(variant, build=lambda sources: plain(Watched(*sources)))
    model = build(replace(study, variants=(watched,)), variant.name).train()
    assert needed == set(variant.needs)
    own = [each for each in asked if each is not None]
    assert own == [variant.schooling] * len(own) and bool(own) == (variant.schooling is not None)
    model = model.trunk if isinstance(model, Grafit) else model  # Grafit itself returns losses
    output = model(toy.TOY.labelled(0).take(range(4))[0])  # an oracle knows these alone
    logits = output if isinstance(output, torch.Tensor) else output[0]
    assert logits.shape == (4, variant.student.get("num_classes", 8)) and logits.isfinite().all()
    logits.sum().backward()
    if variant.student:  # a ViT
        found = built_of(getattr(model, "student", model).eval())
        assert {name: found[name] for name in variant.student} == variant.student


# --- A distillation token, rows, and what is distilled too


def test_a_convnets_predictions_are_those_of_its_run(build, place):
    convnet = "convnet, 32000 labels"
    kept = load_file(built_on(TOKEN, place, convnet, 0).weights)
    taught = [variant for variant in TOKEN.variants if variant.needs == (convnet,)]
    assert {variant.differs["form"] for variant in taught} == {"soft", "hard", "token"}
    for variant in taught:
        model = build(TOKEN, variant.name)
        assert same(model.teacher.state_dict(), kept)
        assert (type(model) is LogitDistillation) == (variant.differs["form"] != "token")
        assert model.hard == (variant.differs["form"] != "soft")
    fresh = build(TOKEN, convnet)
    assert same(fresh.state_dict(), build(TOKEN, convnet).state_dict())
    assert not torch.equal(fresh[0].weight, kept["0.weight"])
    assert TOKEN.variant(convnet).labels == 32000


# --- Teachers


# --- Pre-training


@pytest.mark.parametrize("weights", ["useful", "useless"])
@pytest.mark.parametrize("routing", ["useful", "useless", "a twin's"])
def test_mix_and_match(build, kept, weights, routing):
    """Features are the weights a student starts from, routing the maps it is given: of the central, the
    colour or an untrained teacher. What a twin's routing differs in is the image that the teacher sees."""
    seen = PRETRAINING.variant(f"{weights} features, {routing} routing").twin
    assert seen == ("routing" if routing == "a twin's" else None)
    model = build(PRETRAINING, f"{weights} features, {routing} routing")
    student = model.student.state_dict()
    assert same(without_head(student), without_head(kept({"useful": None, "useless": "colour"}[weights])))
    assert model.student.head.out_features == 8 and all(p.requires_grad for p in model.student.parameters())
    assert model.plan == Plan()
    if routing != "useless":
        assert same(model.teacher.state_dict(), kept(None))
    else:
        for other in (kept(None), kept("colour"), student):
            assert not torch.equal(model.teacher.state_dict()[BODY], other[BODY])


# --- Objects across patches


# --- Before there are labels


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Makes a teacher of distilled-mae in two steps, from a central one that is there: its place and
    record."""
    toy.few_held_out(monkeypatch)
    place = toy.place(tmp_path)
    toy.untrained_models(place)

    def make(schooling, **changes):
        short = replace(schooling, changes={**schooling.changes, "steps": 2}, **changes)
        runner.make_teacher(place, 0, DISTILLED_MAE, short)
        (record,) = read_file(place.records("distilled-mae"))
        return place, short, record

    return make


@pytest.mark.parametrize("name", ["mae", "dmae-logits-last-layer"])
def test_what_is_pretrained_with_a_teacher_is_kept_and_recorded(made, name, monkeypatch):
    place, schooling, record = made(TEACHERS[name])
    assert (record.method, record.seed, record.kind) == (f"teacher {name}", 0, "teacher")
    assert 0.5 < record.results["unlearned"] < 2 and math.isfinite(record.results["pretraining_loss"])
    assert record.config["recipe"]["steps"] == 2 and record.config["unlabelled"] == 16
    vit = load_vit(place.teacher(0, schooling))
    assert vit.num_classes == 0
    student = fine_tune(Sources(place, toy.TOY, 0), schooling)
    assert same(without_head(student.state_dict()), without_head(vit.state_dict()))
    assert student.head.out_features == 8
    toy.forbid_training(monkeypatch)
    runner.make_teacher(place, 0, DISTILLED_MAE, schooling)  # nothing is made twice


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


# --- Components


# --- Weights of the teacher that move, or not


# --- Static maps, and one row


def test_static_maps_are_of_the_teacher(sources):
    vit = sources.teacher()
    images = toy.TOY.unlabelled_images(0).take(range(16))[0]
    maps = mean_patch_maps(vit, images)
    copied, distilled, mean, even, even_resmlp, plain, none = (
        STATIC.variant(name).build(sources)
        for name in (
            "resmlp, mean map copied",
            "resmlp, mean map distilled",
            "vit, mean map copied",
            "vit, even map copied",
            "resmlp, even map copied",
            "resmlp",
            "resmlp, no mixing",
        )
    )
    assert all(torch.equal(A, p) and not A.requires_grad for A, p in zip(static_maps(copied), maps))
    assert torch.equal(distilled.maps, torch.stack(maps))
    own = [A for A in static_maps(distilled.student)]
    assert all(torch.equal(A, B) and A.requires_grad for A, B in zip(own, static_maps(plain)))
    assert torch.equal(mean.walk(images[:2]).layers[1].map[0], mean.walk(images[2:4]).layers[1].map[1])
    assert isinstance(none.blocks[0].linear_tokens, torch.nn.Identity)
    assert all((layer.map == 1 / 17).all() for layer in even.walk(images[:2]).layers)
    mixing = [block.linear_tokens.weight for block in even_resmlp.blocks]
    assert all((weight == 1 / 16).all() and not weight.requires_grad for weight in mixing)
    others = {
        "MLP over patches": (Mlp, None),
        "convolution": (torch.nn.Conv2d, 1),
        "depthwise convolution": (torch.nn.Conv2d, 64),
    }
    for name, (kind, groups) in others.items():
        mixer = STATIC.variant(f"resmlp, {name}").build(sources).blocks[0].linear_tokens
        assert isinstance(getattr(mixer, "convolution", mixer), kind)
        assert groups is None or mixer.convolution.groups == groups
    for model in (copied, even_resmlp, plain, none):
        assert (model.embed_dim, len(model.blocks), model.stem.num_patches) == (64, 4, 16)


# --- The pool


# --- Depth and class attention
