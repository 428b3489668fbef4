"""The book's studies: one thing is different at a time, and it is the one that the name says."""

import math
import pickle
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from timm.layers import Attention, Mlp
from timm.models.cait import TalkingHeadAttn
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from atbook.lab import study as runner
from atbook.lab.pretraining_methods import PRETRAINING_METHODS, PRETRAINING_METHODS_MATCH
from atbook.lab.scales import ALL_RATES, RETRIEVAL, Schooling, scales
from atbook.lab.studies import (
    ABLATIONS,
    AVERAGES,
    CLASS_ATTENTION,
    COMPONENT_STUDY,
    DEEPER,
    DEPTH,
    DISTILLATION,
    DISTILLED_MAE,
    DISTILLED_TOO,
    FAMILY,
    HIDDEN,
    IMBALANCE,
    LABEL_CURVES,
    LAYER_RESERVE,
    LAYERS,
    LOCALITY,
    LONG_TAIL,
    LONGER_LABEL_CURVES,
    LOWER,
    MIXED,
    NATIVE_STUDY,
    ONE_SOFTMAX,
    PAINTERS,
    PAIRS,
    PARTLY_TUNED,
    POOL,
    PRETRAINING,
    ROW_STUDY,
    STATIC,
    STUDIES,
    TOKEN,
    TWINS_BY_DEPTH,
    UNMIXED,
    WITH_COMPONENT,
    WITH_NATIVE,
)
from atbook.lab.study import CENTRAL, Sources, again, built_on, by, fine_tune, pair, scratch, untrained_maps
from atbook.records import read_file
from atbook.worlds import glyphs, pretext
from atfamily.attndistill import row_squared_error
from atfamily.distilled_mae import (
    DistilledHiddenMae,
    DistilledMae,
    centred_squared_error,
    cross_entropy_of_maps,
    distilled_mae_loss,
    squared_error,
)
from atfamily.grafit import Grafit
from atfamily.locality import LocalityAttention, ShiftedPatches
from atfamily.patch_conv import AttentionPool, AveragePool, PatchConvNet
from atfamily.resmlp import mean_patch_maps, static_maps
from atfamily.similarity import CompRess, SimilarityDistillation
from atlib import AttentionTransfer, Plan
from atlib.baselines.distillation import LogitDistillation
from atlib.checkpoint import load_vit, save_weights
from atlib.data import UNLABELLED
from atlib.data.rng import seed_for
from atlib.pair import student_of
from atlib.student import describe, differences
from atlib.train import pretrain
from atlib.train.objectives import two_class_tokens_loss
from atlib.vit import Architecture
from tests import toy
from tests.helpers import randomise, same

EVERY = [(study, variant) for study in (CENTRAL, *STUDIES.values()) for variant in study.variants]
TEACHERS = {schooling.name: schooling for study in STUDIES.values() for schooling in study.teachers}
COLOUR = TEACHERS["colour"]
OF_OTHER_METHODS = [*PRETRAINING_METHODS.teachers, *PRETRAINING_METHODS_MATCH.teachers]
LOSSES = {
    "logits": squared_error,
    "logits without row means": centred_squared_error,
    "maps": cross_entropy_of_maps,
}
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


def test_a_pair_is_a_new_student_beside_its_teacher(sources, kept):
    plan = Plan("q", "distill", layers=[1])
    for schooling in (None, COLOUR):
        model = pair(plan, sources, schooling)
        assert isinstance(model, AttentionTransfer) and model.plan is plan
        assert same(model.teacher.state_dict(), kept(schooling and schooling.name))  # the whole teacher
        assert same(model.student.state_dict(), fresh(0))
    model = by("q", "distill", COLOUR, layers=[1])(sources)
    assert model.plan == plan and same(model.teacher.state_dict(), kept("colour"))
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
    assert [v.name for _, v in pickle.loads(pickle.dumps(EVERY))] == [v.name for _, v in EVERY]


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
            assert variant.like is None or variant.like in scale.tuning
            for trial in variant.trials or ({},):
                scale.recipe(variant.changes | trial)  # raises where a value cannot be meant


@pytest.mark.parametrize("study", [LABEL_CURVES, LONGER_LABEL_CURVES], ids=lambda study: study.name)
def test_label_curves_give_all_methods_the_same_steps_and_numbers(study):
    assert len({variant.changes["steps"] for variant in study.variants}) == 1
    numbers = {}
    for variant in study.variants:
        method = variant.differs["method"]
        numbers.setdefault(method, []).append(variant.labels)
        assert variant.labels == variant.differs["labels"]
        assert variant.like == (method if study is LABEL_CURVES else None) and len(variant.trials) != 1
        assert variant.twin == ("routing" if "twin" in method else None)
    if study is LONGER_LABEL_CURVES:  # how many labels does scratch need to reach what maps reach with 1,000?
        assert numbers.pop("scratch") == [1000, 4000, 32_000]
        assert set(map(tuple, numbers.values())) == {(1000,)}
    else:
        assert set(map(tuple, numbers.values())) == {(250, 4000, 32_000)}


def test_deeper_twins_are_as_deep_as_their_teachers_and_see_what_the_central_ones_see():
    for variant in TWINS_BY_DEPTH.variants:
        depth, method = variant.differs["depth"], variant.differs["method"]
        assert variant.student == {"depth": depth} == dict(DEEPER[depth].model) and variant.like is None
        assert variant.twin == {"copy-routing-twin": "routing", "copy-message-twin": "message"}.get(method)
        choices, central = (each.choices(scales()["match"]) for each in (variant, CENTRAL.variant(method)))
        if method in ("scratch", "copy-message-twin"):  # which may stay near guessing
            assert choices == ALL_RATES and {r["lr"] for r in choices} >= {r["lr"] for r in central}
        else:
            assert choices == central


def test_the_sweep_over_weights_has_every_weight_that_can_be_chosen():
    """Beside the recipe's own, 3, with which the central experiment has its runs."""
    weights = {v.changes["transfer_weight"] for v in DISTILLATION.variants} | {3.0}
    for name in DISTILLATION.only:
        assert {recipe["transfer_weight"] for recipe in scales()[name].tuning["distill"]} <= weights


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


def test_plans_are_what_their_names_say(build):
    for study, name, expected in (
        (LAYERS, "distill first 2", {"layers": (0, 1), "how": "distill"}),
        (LAYERS, "distill last 1", {"layers": (3,)}),
        (LAYERS, "copy first 3", {"layers": (0, 1, 2), "how": "copy"}),
        (LAYERS, "distill last 3", {"layers": (1, 2, 3), "how": "distill"}),
        (LAYERS, "copy heads 2", {"heads": (0, 1), "how": "copy"}),
        (AVERAGES, "copy mean of queries", {"average": "queries"}),
        (FAMILY, "distilled queries", {"what": "q", "how": "distill"}),
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
    assert all(parameter.requires_grad for parameter in model.student.parameters())
    assert model.student.head.out_features == 8


# --- A distillation token, rows, and what is distilled too


def test_the_tokens_variants_are_what_their_names_say(build, sources):
    for name in ("soft", "hard"):
        model = build(TOKEN, f"{name}, ViT")
        assert type(model) is LogitDistillation and model.hard == (name == "hard")
        assert same(model.teacher.state_dict(), sources.fine_tuned().state_dict())
    kinds = {"ViT": VisionTransformer, "schooled convnet": nn.Sequential}
    for teacher, kind in kinds.items():
        model = build(TOKEN, f"token, {teacher}")
        assert type(model.teacher) is kind and model.hard and model.maps is None
    both = build(TOKEN, "maps and token, ViT")
    expected = Plan(how="distill", unequal_prefix="own", mismatched=True)
    assert both.maps.plan == expected and both.maps.pairing.own_keys == (1,)
    assert same(both.teacher.state_dict(), sources.fine_tuned().state_dict())
    body = both.maps.teacher.state_dict()[BODY]
    assert torch.equal(body, sources.teacher().state_dict()[BODY]), "maps come from the central teacher"
    weight = TOKEN.variant("maps").changes["transfer_weight"]
    assert both.maps_weight * TOKEN.variant("maps and token, ViT").changes["transfer_weight"] == weight == 10
    two = build(TOKEN, "two class tokens")
    assert two.distilled_training and TOKEN.variant("two class tokens").loss is two_class_tokens_loss


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


def test_all_of_the_tokens_study_is_tuned_alike_and_sees_the_same_images():
    assert len({str(variant.trials) for variant in TOKEN.variants}) == 1
    assert {variant.changes["steps"] for variant in TOKEN.variants} == {800}
    labelled_only = {variant.name for variant in TOKEN.variants if variant.images is None}
    assert labelled_only == {"scratch", "two class tokens", "convnet, 32000 labels"}
    scale = replace(toy.TOY, unlabelled=40)
    (images,) = {variant.images for variant in TOKEN.variants if variant.images}
    found, labelled, more = images(scale, 3), scale.labelled(3), scale.unlabelled_images(3)
    assert torch.equal(found.pixels, torch.cat([labelled.pixels, more.pixels])) and len(found) == 56
    assert found.targets.tolist() == [*labelled.targets.tolist(), *[UNLABELLED] * 40]
    assert len(scales()["find"].unlabelled_images(0)) == 8000


def test_the_rows_are_those_of_the_name(build):
    for variant in ROW_STUDY.variants:
        assert build(ROW_STUDY, variant.name).plan == Plan(**variant.differs)
        assert variant.like == variant.differs["how"]


def test_what_is_distilled_too(build, sources):
    model = build(DISTILLED_TOO, "distill untrained")
    assert model.plan == Plan(how="distill") and same(model.student.state_dict(), fresh(0))
    assert same(model.teacher.state_dict(), untrained_maps(sources).teacher.state_dict())


def test_likeness_is_distilled_into_two_heads_from_the_central_teacher(build, kept):
    for name, method in (("seed", SimilarityDistillation), ("compress", CompRess)):
        model = build(DISTILLED_TOO, f"two heads, {name}")
        assert type(model) is method and same(model.teacher.state_dict(), kept())
        assert model.student.blocks[0].attn.num_heads == 2


def test_one_thing_of_attndistill_is_different(build):
    def found(study, name):
        model = build(study, f"two heads, attndistill{name}")
        merge = model.merge and model.merge.keywords
        return model.temperature, model.attention_weight, merge, (len(model.projector) // 2)

    plain = found(PAIRS, "")
    assert plain == (10.0, 0.1, None, 4)
    expected = {
        "T = 5": (5.0, 0.1, None, 4),
        "T = 20": (20.0, 0.1, None, 4),
        "max of heads": (10.0, 0.1, {"how": "max"}, 4),
        "min of heads": (10.0, 0.1, {"how": "min"}, 4),
        "mean of heads": (10.0, 0.1, {"how": "mean"}, 4),
        "projector of 1": (10.0, 0.1, None, 1),
        "projector of 2": (10.0, 0.1, None, 2),
        "projector of 8": (10.0, 0.1, None, 8),
        "attention weight 0.01": (10.0, 0.01, None, 4),
        "attention weight 1": (10.0, 1.0, None, 4),
        "class token alone": (10.0, 0.0, None, 4),
        "squared error": plain,
        "weighted by value": plain,
    }
    assert {name: found(DISTILLED_TOO, f" {name}") for name in ABLATIONS} == expected
    others = {name: build(DISTILLED_TOO, f"two heads, attndistill {name}") for name in ABLATIONS}
    assert [name for name, model in others.items() if model.compare is row_squared_error] == ["squared error"]
    assert [name for name, model in others.items() if model.by_value] == ["weighted by value"]
    tuned = [v for v in (*PAIRS.variants, *DISTILLED_TOO.variants) if "attndistill" in v.name]
    assert len({str((variant.like, variant.trials, variant.student)) for variant in tuned}) == 1


# --- Teachers


def test_teachers_have_names_and_recipes_of_their_own():
    """A name is a file name: two ways of making a teacher under one name would be taken for each other."""
    names = [schooling.name for study in STUDIES.values() for schooling in study.teachers]
    assert len(set(names)) == len(names)
    for name, schooling in TEACHERS.items():
        assert set(name) <= set("abcdefghijklmnopqrstuvwxyz-")
        assert not name.startswith("seed"), "nor is any taken for the central one, teacher-seed0"
        recipe = replace(pretext.RETRIEVAL, **schooling.changes)
        # the central ones' steps, but where the task is harder
        steps = {"offset": 3000, "beside": 8000}.get(name, pretext.RETRIEVAL.steps)
        if schooling in PAINTERS.values():  # alike, so that they can be compared
            expected = replace(pretext.RETRIEVAL, steps=500, betas=(0.9, 0.95), transfer_weight=1.0)
        else:
            expected = replace(pretext.RETRIEVAL, steps=steps)
        assert recipe == expected or schooling in OF_OTHER_METHODS


def test_teachers_differ_in_one_thing():
    parts = ("outputs", "images", "loss", "world", "model", "around", "again")
    others = {"colour": {"outputs", "images", "loss"}, "offset": {"world"}, "inverted": {"world"}}
    others |= {deeper.name: {"model", "world"} for deeper in DEEPER.values()}
    others |= {"placed": {"outputs", "images", "loss"}, "beside": {"outputs", "images", "loss", "world"}}
    for name, schooling in TEACHERS.items():
        changed = {part for part in parts if getattr(schooling, part) != getattr(RETRIEVAL, part)}
        if schooling not in (*PAINTERS.values(), *OF_OTHER_METHODS):
            assert changed == others.get(name, {"model"})
    assert TEACHERS["offset"].world == glyphs.World(offset=4)
    assert TEACHERS["inverted"].world == glyphs.World(rendering="inverted")
    assert TEACHERS["beside"].world == glyphs.World(pointer=1)
    assert (COLOUR.outputs, COLOUR.images) == (6, pretext.colour_images)


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


def test_methods_take_the_teacher_that_they_name(build, kept):
    expected = kept("colour")
    tuned = build(PRETRAINING, "colour, fine-tune").state_dict()
    assert same(without_head(tuned), without_head(expected))
    for how in ("copy", "distill"):
        model = build(PRETRAINING, f"colour, {how}")
        assert same(model.teacher.state_dict(), expected)
        assert model.plan.how == how == PRETRAINING.variant(f"colour, {how}").like


# --- Objects across patches


@pytest.mark.parametrize("variant", LOCALITY.variants, ids=lambda variant: variant.name)
def test_local_students_have_both_remedies_standard_ones_neither_and_others_the_named_one(
    build, kept, variant
):
    model, method = build(LOCALITY, variant.name), variant.differs["method"]
    student = getattr(model, "student", model)
    kind = variant.differs["student"]
    assert isinstance(student.patch_embed, ShiftedPatches) == (kind in ("local", "shifted patches"))
    local = {isinstance(block.attn, LocalityAttention) for block in student.blocks}
    assert local == {kind in ("local", "local attention")}
    assert torch.equal(student.state_dict()[BODY], fresh(0)[BODY]), "the same first weights"
    assert (variant.like, variant.labels) == (method, variant.differs["labels"])
    assert (variant.world, variant.trials) == (glyphs.World(offset=4), LOCALITY.variants[0].trials)
    if method != "scratch":
        held = model.teacher.state_dict()
        assert same(held, {each: kept("offset")[each] for each in held}) and model.plan.how == method


# --- Before there are labels


@pytest.mark.parametrize(
    "schooling, layers, match, mixed",
    [
        *(
            (schooling, {"last layer": (3,), "all layers": (0, 1, 2, 3)}[where], LOSSES[target], True)
            for (target, where), schooling in MIXED.items()
        ),
        *(
            (LOWER["logits", f"{word} layer"], (layer,), squared_error, True)
            for layer, word in enumerate(("first", "second", "third"))
        ),
        (UNMIXED, (0, 1, 2, 3), cross_entropy_of_maps, False),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_an_auto_encoder_learns_from_the_central_teacher_what_it_is_to(
    schooling, layers, match, mixed, kept, sources
):
    vit = Architecture("glyphs", {"num_classes": schooling.outputs}).build()
    model = schooling.around(vit, sources.teacher)
    assert isinstance(model, DistilledMae) and same(model.teacher.state_dict(), kept())
    assert model.student.vit is vit and model.student.visible == 8
    assert model.layers == tuple((layer, layer) for layer in layers) and model.match is match
    assert len([*model.mixing.parameters()]) == (len(layers) if mixed else 0)
    assert schooling.loss is distilled_mae_loss


@pytest.mark.parametrize(
    "where, layers", [("last layer", (3,)), ("all layers", (0, 1, 2, 3))], ids=lambda value: str(value)
)
def test_an_auto_encoder_learns_hidden_states_of_the_central_teacher(where, layers, kept, sources):
    schooling = HIDDEN["hidden states", where]
    vit = Architecture("glyphs", {"num_classes": schooling.outputs}).build()
    model = schooling.around(vit, sources.teacher)
    assert type(model) is DistilledHiddenMae and same(model.teacher.state_dict(), kept())
    assert model.student.vit is vit and model.student.visible == 8
    assert model.layers == tuple((layer, layer) for layer in layers)
    assert schooling.loss is distilled_mae_loss


def test_an_auto_encoder_alone():
    vit = Architecture("glyphs").build()
    model = TEACHERS["mae"].around(vit, None)
    assert isinstance(model, pretrain.MaskedAutoencoder) and model.vit is vit and model.visible == 8
    assert TEACHERS["mae"].loss is pretrain.mae_loss


@pytest.mark.parametrize("study", [DISTILLED_MAE, LAYER_RESERVE], ids=lambda study: study.name)
def test_all_of_a_comparison_have_one_grid(study):
    assert len({str(variant.trials) for variant in study.variants}) == 1
    assert len(study.variants[0].trials) >= 3


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


def test_a_student_of_a_teacher_starts_from_other_first_weights(monkeypatch):
    """It is built like its teacher, and from the teacher's first weights it would have its maps at once."""
    firsts = []

    def keep(model, *arguments, **options):
        firsts.append(getattr(getattr(model, "student", model), "vit", model).state_dict())
        return [{"unlearned": 0.0, "step": 0}]

    monkeypatch.setattr("atbook.lab.scales.train", keep)
    for schooling in (RETRIEVAL, TEACHERS["mae"], TEACHERS["dmae-maps-all-layers"]):
        schooling.make(toy.TOY.pretraining, 8, 0, central=Architecture("glyphs").build)
    retrieval, mae, dmae = firsts
    assert not torch.equal(retrieval[BODY], mae[BODY]) and torch.equal(mae[BODY], dmae[BODY])
    assert not torch.equal(mae[BODY], fresh(0)[BODY]), "nor from those of the students that are taught later"


def test_a_schooling_that_needs_a_teacher_says_so():
    with pytest.raises(ValueError, match="central="):
        TEACHERS["dmae-maps-all-layers"].make(toy.TOY.pretraining, 8, 0)


def test_distilling_into_a_pretrained_student(build, kept):
    model = build(DISTILLED_MAE, "maps, all layers, head by head, then distill")
    assert same(model.teacher.state_dict(), kept()) and model.plan == Plan(how="distill")
    assert same(without_head(model.student.state_dict()), kept("dmae-maps-head-by-head"))


@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("labels", [250, 4000])
def test_the_first_blocks_are_the_teachers(build, kept, number, labels):
    assert LAYER_RESERVE.variant(f"first {number}, {labels} labels").labels == labels
    found = build(LAYER_RESERVE, f"first {number}, {labels} labels").state_dict()
    teacher, drawn = kept(), fresh(0)
    assert torch.equal(found["pos_embed"], teacher["pos_embed"])
    for layer in range(4):
        name = f"blocks.{layer}.attn.qkv.weight"
        assert torch.equal(found[name], (teacher if layer < number else drawn)[name])


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
    assert [variant.name for variant in LONG_TAIL.variants] == [
        variant.like for variant in LONG_TAIL.variants
    ]
    assert len({variant.images for variant in LONG_TAIL.variants}) == 1


# --- Components


@pytest.mark.parametrize(
    "study, name, schooling",
    [(COMPONENT_STUDY, *item) for item in WITH_COMPONENT.items()]
    + [(NATIVE_STUDY, *item) for item in WITH_NATIVE.items()],
    ids=[*WITH_COMPONENT, *WITH_NATIVE],
)
def test_a_teacher_has_one_component_more_and_a_matched_student_has_it_too(build, study, name, schooling):
    standard, teacher = (Architecture("glyphs", model).build() for model in ({}, schooling.model))
    described = {"average pooling": "pooling", "norm before the blocks": "pre_norm"}
    component = described.get(name, name.replace(" ", "_"))
    assert set(differences(teacher, standard)) == {component}
    matched, other = (build(study, f"{name}, copy to {to}") for to in ("matched", "standard"))
    assert differences(matched.teacher, matched.student) == matched.mismatched == {}
    assert set(differences(other.teacher, other.student)) == {component}
    assert differences(matched.student, teacher) == {} and differences(other.student, standard) == {}
    assert matched.plan.how == other.plan.how == "copy"
    assert differences(build(study, f"{name}, scratch"), teacher) == {}, "so has the floor"


# --- Weights of the teacher that move, or not


@pytest.mark.parametrize(
    "name, moving", [("frozen probe", {"head"}), ("fine-tune attention", {"attn", "head"})]
)
def test_what_of_the_teacher_moves(build, kept, name, moving):
    model = build(PARTLY_TUNED, name)
    start, trained = kept(), {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert {name.split(".")[-2 if "head" in name else -3] for name in trained} == moving
    assert len(trained) == 2 + (4 * 4 if "attn" in moving else 0)  # qkv and proj of four layers, and the head
    assert same(without_head(model.state_dict()), without_head(start))
    assert model.head.out_features == 8


def test_an_mlp_probe_has_a_hidden_layer_over_frozen_weights(build, kept):
    model = build(PARTLY_TUNED, "frozen MLP probe")
    trained = {name: tuple(w.shape) for name, w in model.named_parameters() if w.requires_grad}
    assert trained == {"head.0.weight": (128, 64), "head.0.bias": (128,)} | {
        "head.2.weight": (8, 128),
        "head.2.bias": (8,),
    }
    assert same(without_head(model.state_dict()), without_head(kept()))


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


def test_pools_are_what_their_names_say(build, kept):
    for name, pool, copy in (
        ("average", AveragePool, None),
        ("attention", AttentionPool, None),
        ("row copied", AttentionPool, True),
        ("row distilled", AttentionPool, False),
        ("average, row copied", AveragePool, True),
        ("a query for each class", AttentionPool, None),
    ):
        model = build(ONE_SOFTMAX, name)
        student = getattr(model, "student", model)
        assert isinstance(student.pool, pool) and isinstance(student, PatchConvNet)
        assert getattr(model, "needs_teacher", None) is copy
        assert len(student.trunk) == 1 + 4 and student.trunk[0][-1].out_channels == 64
        if copy is not None:
            assert model.temperature == 4 and model.layer == 3 and same(model.teacher.state_dict(), kept())
    assert build(ONE_SOFTMAX, "a query for each class").pool.queries.shape == (1, 8, 64)
    assert build(ONE_SOFTMAX, "attention").pool.queries.shape == (1, 1, 64)


def test_a_resnet_gets_either_pool_over_the_students_grid(build):
    average, attention = (build(ONE_SOFTMAX, f"ResNet, {pool}").eval() for pool in ("average", "attention"))
    assert isinstance(average.pool, AveragePool) and isinstance(attention.pool, AttentionPool)
    assert same(average.trunk.state_dict(), attention.trunk.state_dict())
    assert attention.look(torch.zeros(1, 3, 32, 32)).grid == (4, 4)


@pytest.mark.parametrize("study", [STATIC, ONE_SOFTMAX])
def test_other_networks_are_tuned_like_the_vits_beside_them(study):
    assert len({(variant.like, *map(str, variant.trials)) for variant in study.variants}) == 1
    assert study.variants[0].trials.values == (1e-3, 2e-3, 4e-3, 8e-3)


def test_the_record_of_another_network_says_which(place):
    run = runner.Run(ONE_SOFTMAX, place, "average", 0, trial=0)
    for trial, method in ((0, "scratch"), (1, "scratch")):
        runner.make_run(runner.Run(CENTRAL, place, method, 100, trial))
    runner.make_run(run)
    assert run.record().config["recipe"]["student"] == "PatchConvNet"
    (central,) = (r for r in read_file(place.records("transfer")) if r.trial == 0 and r.method == "scratch")
    assert "student" not in central.config["recipe"]


# --- The pool


def test_the_pool_is_trained_from_scratch_only():
    assert POOL.teachers == () and all(variant.like == "scratch" for variant in POOL.variants)
    for variant in POOL.variants:
        of = variant.differs
        assert variant.labels == of.get("labels") and variant.changes.get("steps") == of.get("steps")
        assert variant.stop_at == of.get("step")


def test_checkpoints_of_the_pool_lie_along_its_longest_run():
    longest = POOL.variant("8000 labels, 1000 steps")
    along = [variant for variant in POOL.variants if variant.stop_at]
    assert len(along) == 1 and all(0 < variant.stop_at < 1000 for variant in along)
    for variant in along:
        assert replace(variant, label=longest.label, differs=longest.differs, stop_at=None) == longest


# --- Depth and class attention


def test_all_of_a_comparison_choose_from_the_same_rates_at_the_same_budget():
    for study in (DEPTH, CLASS_ATTENTION):
        for variant in study.variants:
            assert variant.changes == {"steps": 400}
            assert (variant.trials.name, variant.trials.values) == ("lr", (5e-4, 2e-3, 8e-3))
            of = variant.differs
            assert variant.like == of.get("method", of.get("how", "scratch"))


@pytest.mark.parametrize("variant", DEPTH.variants, ids=lambda variant: variant.name)
def test_depth_and_factors_are_those_of_the_name(build, place, variant):
    model, of = build(DEPTH, variant.name), variant.differs
    student = getattr(model, "student", model)
    assert len(student.blocks) == of["depth"]
    found = {
        gamma for block in student.blocks for scale in (block.ls1, block.ls2) for gamma in starts_of(scale)
    }
    expected = {
        "layer scale": (64, pytest.approx(1e-5 if len(student.blocks) == 24 else 0.1)),
        "layer scale from 0": (64, 0.0),
        "one scalar": (1, pytest.approx(1e-5)),
        "rezero": (1, 0.0),
        "skip init": (1, pytest.approx(48**-0.5)),
        "fixup": (1, 1.0),
    }
    if of["factors"] == "learned factors, frozen":
        kept = load_file(built_on(DEPTH, place, "24 layers, layer scale", 0).weights)
        state = student.state_dict()
        assert all(torch.equal(value, kept[name]) for name, value in state.items() if "gamma" in name)
        first = build(DEPTH, "24 layers").state_dict()
        assert all(torch.equal(value, state[name]) for name, value in first.items())
        moved = {name for name, weight in student.named_parameters() if weight.requires_grad}
        assert moved == set(first) and len(set(state) - moved) == 48
    elif of["factors"] == "layer scale, uniform":
        assert {count for count, _ in found} == {64} and 0 <= min(found)[1] < 1e-6 < max(found)[1] < 2e-5
    else:
        assert [*found] == [value for name, value in expected.items() if name == of["factors"]]
    spread = torch.stack([block.attn.proj.weight for block in student.blocks]).std().item()
    xavier = 0.67 * 24**-0.25 * (6 / 128) ** 0.5 / 3**0.5
    starts = {"fixup": 0.0, "t-fixup": xavier}  # timm's is 0.02
    assert spread == pytest.approx(starts.get(of["factors"], 0.02), rel=0.02)
    if of["method"] == "copy":
        pairs = [(layer, layer * 4 // len(student.blocks)) for layer in range(len(student.blocks))]
        assert [*model.pairing.layers] == pairs and model.plan.how == "copy"
    else:
        assert model is student


def starts_of(scale):
    """How many factors a branch has, and where they all start; nothing where it has none."""
    return {(len(scale.gamma), value) for value in scale.gamma.tolist()} if hasattr(scale, "gamma") else set()


def test_scratch_and_taught_caits_begin_alike_and_are_taught_the_part_named(build, kept):
    first = build(CLASS_ATTENTION, "cait, scratch").state_dict()
    for variant in CLASS_ATTENTION.variants:
        if "part" not in variant.differs:  # a scratch one
            continue
        model = build(CLASS_ATTENTION, variant.name)
        assert same(model.student.state_dict(), first) and same(model.teacher.state_dict(), kept())
        how, part = variant.differs["how"], variant.differs["part"]
        given = {"patches": (how, None), "class rows": (None, how), "both": (how, how)}[part]
        assert (model.patches, model.class_rows) == given
        assert model.layers == ({i: i for i in range(4)} if model.patches else {})
        assert model.class_layers == ({0: 2, 1: 3} if model.class_rows else {})


@pytest.mark.parametrize(
    "name, joins_before",
    [("late class token", 2), *((f"class token before layer {layer}", layer) for layer in (0, 1, 3))],
)
def test_a_late_class_token_joins_where_it_is_said_and_has_the_students_first_weights(
    build, name, joins_before
):
    model = build(CLASS_ATTENTION, f"{name}, scratch")
    assert (model.insert_at, len(model.blocks)) == (joins_before, 4) and same(model.state_dict(), fresh(0))


def test_of_a_cait_without_talking_heads_the_attention_alone_is_another(build):
    plain, talking = (build(CLASS_ATTENTION, f"cait{how}, scratch") for how in (" without talking heads", ""))
    assert {type(block.attn) for block in talking.blocks} == {TalkingHeadAttn}
    assert {type(block.attn) for block in plain.blocks} == {Attention}
    kept, lost = plain.state_dict(), talking.state_dict()
    assert {name.split(".")[-2] for name in lost.keys() - kept.keys()} == {"proj_l", "proj_w"}
    assert kept.keys() <= lost.keys() and len(plain.blocks_token_only) == 2
