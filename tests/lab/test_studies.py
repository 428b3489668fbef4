"""The book's studies: one thing is different at a time, and it is the one that the name says."""

import math
import pickle
from collections import Counter
from dataclasses import replace

import pytest
import torch
from timm.models.deit import VisionTransformerDistilled

from atbook.lab import study as runner
from atbook.lab.pretraining_methods import PRETRAINING_METHODS
from atbook.lab.scales import scales
from atbook.lab.studies import DISTILLED_MAE, IMBALANCE, LONG_TAIL, PRETRAINING, STATIC, STUDIES
from atbook.lab.study import (
    ACCURACY,
    CENTRAL,
    Sources,
    again,
    built_on,
    by,
    fine_tune,
    schoolings_of,
    scratch,
)
from atbook.records import read_file
from atbook.worlds import glyphs
from atfamily.grafit import snca_loss
from atfamily.resmlp import mean_patch_maps, static_maps
from atlib import Plan
from atlib.checkpoint import load_vit, write_tensors
from atlib.loading import seed_for
from atlib.pair import student_of
from atlib.student import describe
from atlib.vit import Architecture
from tests import toy
from tests.helpers import randomise, same, without_head

EVERY = [
    (study, variant)
    for study in (CENTRAL, *STUDIES.values())
    if study.name != "mosaics"  # which has a world, and a test, of its own
    for variant in study.variants
]
# One of those built, trained and measured alike, where recipe, number of labels or weights differ.
BUILT = {
    (
        pickle.dumps((v.build, v.loss, v.measure)),
        str((v.student, v.needs, v.schooling and v.schooling.model)),
    ): (study, v)
    for study, v in reversed(EVERY)
}
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
                kept = built_on(study, place, needed.name, 0).weights
                write_tensors(kept, student_of(model).state_dict(), {})
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
        return variant.build(sources._replace(scale=scale, schooling=variant.schooling))

    return built


@pytest.fixture
def kept(place):
    """The weights in a teacher's file: the central one's or another's."""
    return lambda name=None: load_vit(place.teacher(0, TEACHERS.get(name))).state_dict()


# --- What studies are made of


@pytest.mark.parametrize("schooling, outputs", [(None, 192), (COLOUR, 6)])
def test_fine_tune_has_the_teachers_body_and_a_new_head(sources, kept, schooling, outputs):
    expected = kept(schooling and schooling.name)
    sources = sources._replace(schooling=schooling)
    teacher, student = sources.teacher(), fine_tune(sources)
    assert same(teacher.state_dict(), expected) and teacher.head.out_features == outputs
    assert same(without_head(student.state_dict()), without_head(expected))
    assert student.head.out_features == 8 and all(p.requires_grad for p in student.parameters())
    torch.manual_seed(99)  # what was drawn before does not matter
    assert same(fine_tune(sources).state_dict(), student.state_dict())


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
        torch.manual_seed(seed_for(0, "student", 1))
        assert same(students[1], Architecture("glyphs").build().state_dict())
        assert not torch.equal(students[0][BODY], students[1][BODY])
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
        "drop_rate": student.head_drop.p,
        "drop_path_rate": pytest.approx(getattr(student.blocks[-1].drop_path1, "drop_prob", 0.0)),
        "global_pool": student.global_pool,
        "distilled": isinstance(student, VisionTransformerDistilled),
    }


def learns_from_the_central(schooling):
    """{"central teacher"} where a schooling asks for it, else nothing."""
    asked = set()
    if schooling is not None:
        vit = Architecture(schooling.preset, {**schooling.model, "num_classes": schooling.outputs}).build()
        schooling.around(vit, lambda: asked.add("central teacher") or Architecture("glyphs").build())
    return asked


def test_whose_schooling_learns_from_the_central_teacher_needs_it():
    for variant in {pickle.dumps((v.schooling.around, v.needs)): v for _, v in EVERY if v.schooling}.values():
        assert learns_from_the_central(variant.schooling) <= {*variant.needs}, variant.name


@pytest.mark.parametrize(
    "study, variant", BUILT.values(), ids=[f"{s.name} {v.name}" for s, v in BUILT.values()]
)
def test_every_variant_is_built_of_what_it_names_and_trains_one_step(build, study, variant):
    asked, needed = [], set()

    class Watched(Sources):
        def teacher(self):
            asked.append(self.schooling)
            return super().teacher()

        def model_of(self, study, method):
            needed.add(method)
            return super().model_of(study, method)

    def noted(name, says):
        return lambda self: needed.add(says) or getattr(super(Watched, self), name)()

    for says in ("central teacher", "fine-tuned", "another teacher"):
        name = says.replace(" ", "_").replace("-", "_")
        setattr(Watched, name, noted(name, says))
    plain = variant.build
    watched = replace(variant, build=lambda sources: plain(Watched(*sources)))
    model = build(replace(study, variants=(watched,)), variant.name).train()
    assert variant.schooling is None or variant.schooling in asked, "it is made for nothing"
    assert needed | learns_from_the_central(variant.schooling) == set(variant.needs)
    assert variant.needs_central or None not in asked
    scale = replace(variant.scale(toy.TOY), labels=16)
    images = variant.images(scale, 0) if variant.images else scale.labelled(0, twin=variant.twin)
    variant.loss(model, *images.take(range(4)), replace(scale.training, **variant.changes)).backward()
    learns = any(weight.grad is not None and weight.grad.any() for weight in model.parameters())
    assert learns or variant.loss is snca_loss  # which remembers no neighbours yet
    if variant.measure is not ACCURACY:
        figures = variant.measure.of(model.eval(), scale.held_out("test", variant.twin))
        assert 0 <= figures[variant.measure.figure] <= 1
    if variant.student and study.name != "finer":
        built = built_of(getattr(model, "student", model).eval())
        assert {name: built[name] for name in variant.student} == variant.student


# --- Pre-training


@pytest.mark.parametrize("weights", ["useful", "useless"])
@pytest.mark.parametrize("routing", ["useful", "useless", "a twin's"])
def test_mix_and_match(build, kept, weights, routing):
    """Features are a student's first weights, routing its maps; a twin's routing differs in the image."""
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


# --- Teachers of a study's own


@pytest.mark.parametrize(
    "study, methods, central",
    [
        ("sizes", None, False),
        ("sizes", ["width 48, scratch"], False),
        ("pretraining", ["colour, copy"], False),
        ("pretraining", ["useless features, useful routing"], True),
        ("distilled-mae", ["MAE"], False),
        ("distilled-mae", ["logits, last layer"], True),
        ("token", ["soft, ViT"], True),
        ("rows", None, True),
    ],
)
def test_central_teachers_are_made_where_a_student_needs_them(tmp_path, monkeypatch, study, methods, central):
    made, study = [], STUDIES[study]
    monkeypatch.setattr(runner, "make_run", lambda run: None)
    monkeypatch.setattr(runner, "make_teacher", lambda place, seed, *of: made.append((seed, of)))
    variants = [variant for variant in study.variants if methods is None or variant.name in methods]
    runner.make_models(study, variants, toy.place(tmp_path), [0, 3], 1)
    assert [seed for seed, of in made if not of] == ([0, 3] if central else [])
    of_its_own = [(seed, of[1].name) for seed, of in made if of]
    assert of_its_own == [(seed, school.name) for school in schoolings_of(variants) for seed in (0, 3)]


MADE = [
    *((PRETRAINING_METHODS, schooling) for schooling in PRETRAINING_METHODS.teachers),
    *((DISTILLED_MAE, TEACHERS[name]) for name in ("mae", "dmae-logits-last-layer")),
]


@pytest.mark.parametrize("study, schooling", MADE, ids=[schooling.name for _, schooling in MADE])
def test_a_teacher_is_made_once_kept_and_recorded(study, schooling, place, tmp_path, monkeypatch):
    toy.few_held_out(monkeypatch)
    folder = toy.place(tmp_path)
    toy.untrained_models(folder)
    short = replace(schooling, changes={**schooling.changes, "steps": 2})
    runner.make_teacher(folder, 0, study, short)
    (record,) = read_file(folder.records(study.name))
    assert (record.method, record.seed, record.kind) == (f"teacher {schooling.name}", 0, "teacher")
    assert record.config["recipe"]["steps"] == 2 and record.config["unlabelled"] == 16
    assert 0 <= record.results["unlearned"] < 2 and math.isfinite(record.results["pretraining_loss"])
    assert ("evenness" in record.results) == schooling.measures_maps
    kept = load_vit(folder.teacher(0, schooling))
    student = fine_tune(Sources(folder, toy.TOY, 0, schooling=schooling))
    assert same(without_head(student.state_dict()), without_head(kept.state_dict()))
    toy.forbid_training(monkeypatch)
    runner.make_teacher(folder, 0, study, schooling)


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


def test_static_maps_are_of_the_teacher(sources):
    vit = sources.teacher()
    images = toy.TOY.unlabelled_images(0).take(range(16))[0]
    maps = mean_patch_maps(vit, images)
    copied, distilled, even_resmlp = (
        STATIC.variant(f"resmlp, {given}").build(sources)
        for given in ("mean map copied", "mean map distilled", "even map copied")
    )
    mean, even, plain = (
        STATIC.variant(name).build(sources)
        for name in ("vit, mean map copied", "vit, even map copied", "resmlp")
    )
    assert all(torch.equal(A, p) and not A.requires_grad for A, p in zip(static_maps(copied), maps))
    assert torch.equal(distilled.maps, torch.stack(maps))
    own = static_maps(distilled.student)
    assert all(torch.equal(A, B) and A.requires_grad for A, B in zip(own, static_maps(plain)))
    assert torch.equal(mean.walk(images[:2]).layers[1].map[0], mean.walk(images[2:4]).layers[1].map[1])
    assert all((layer.map == 1 / 17).all() for layer in even.walk(images[:2]).layers)
    mixing = [block.linear_tokens.weight for block in even_resmlp.blocks]
    assert all((weight == 1 / 16).all() and not weight.requires_grad for weight in mixing)
    for model in (copied, even_resmlp, plain):
        assert (model.embed_dim, len(model.blocks), model.stem.num_patches) == (64, 4, 16)
