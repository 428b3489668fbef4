"""What the book measures on trained models, tried on untrained ones: which images, models and layers."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from atbook.lab import evals
from atbook.lab.evals import FILTER, compared, under_shifts
from atbook.lab.scales import TUNING_SEED
from atbook.lab.studies import HEAD_BY_HEAD, LONG_TAIL, PAINTERS, POOL
from atbook.lab.study import Sources
from atbook.worlds import glyph_images, glyphs
from atbook.worlds import shifts as ood
from atbook.worlds.shifts import SHIFTS, all_shifts, shifted
from atfamily.depth import branch_ratios
from atfamily.measures.cka import linear_cka
from atfamily.measures.subsets import class_counts, class_groups, group_accuracy
from atlib import AttentionTransfer, Plan, create_vit, walk
from atlib.analysis import attention_entropy, head_divergence
from atlib.checkpoint import save_vit
from atlib.vit import Architecture
from tests import toy
from tests.helpers import randomise

SCALE, LOOKED_AT = replace(toy.TOY, labels=80), 12


def vit(seed, outputs=8, **options):
    return randomise(create_vit("glyphs", num_classes=outputs, **options), seed).eval()


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Untrained models of seed 0; `compared` takes its teacher from here."""
    place = toy.place(tmp_path_factory.mktemp("models"))
    toy.untrained_models(place)
    return Sources(place, SCALE, 0)


@pytest.fixture(scope="module")
def models(sources):
    """Three methods' models: a Copy pair, a distilled pair, a ViT."""
    return {
        "copy": AttentionTransfer(sources.teacher(), vit(11), Plan()).eval(),
        "distill": AttentionTransfer(sources.teacher(), vit(12), Plan(how="distill")).eval(),
        "fine-tune": vit(13),
    }


@torch.no_grad()
def logits_of(model, images):
    """Of a pair: the student's, with the teacher's maps where it copies."""
    output = model(images.take(range(len(images)))[0])
    return getattr(output, "logits", output)


def share(guesses, labels):
    return (guesses == labels).double().mean().item()


@torch.no_grad()
def seen_by(model, x):
    return model.walk(x) if hasattr(model, "walk") else walk(model, x)


def cka_of(model, other):
    """Of the class tokens after every layer with those of another."""
    return [[linear_cka(a[:, 0], b[:, 0]) for b in other.stream] for a in model.stream]


def close(found, expected):
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-4, atol=1e-5)


def test_a_probe_reads_shape_and_place_from_maps_that_have_them(sources, monkeypatch):
    """By maps that say what is shown: a routing twin names the place alone, a message twin the shape."""
    seen, generate = [], evals.glyphs.generate

    def maps(vit, images):
        drawn = next(one for one in seen if torch.equal(torch.from_numpy(one.images), images.pixels))
        of = ((drawn.shape, 8), (drawn.cell, 16))
        return torch.cat([torch.nn.functional.one_hot(torch.from_numpy(x), n) for x, n in of], 1).float()

    monkeypatch.setattr(evals.glyphs, "generate", lambda *given: seen.append(generate(*given)) or seen[-1])
    monkeypatch.setattr(evals, "_maps_of", maps)
    monkeypatch.setattr(evals, "PROBED", {"train": 600, "test": 300})
    monkeypatch.setattr(evals, "mlp_probe", partial(evals.mlp_probe, steps=60))
    found = evals.named_from_maps({"copy": None}, sources)["copy"]
    assert found["itself"] == found["distractors"] == {"shape": 1.0, "cell": 1.0}
    assert found["routing"]["cell"] == 1.0 and found["routing"]["shape"] < 0.25
    assert found["message"]["shape"] == 1.0 and found["message"]["cell"] < 0.15


def test_under_shifts_by_hand(models, sources, monkeypatch):
    """Two shifts at one severity, of 40 images; "filtered" are those that another model gets wrong."""
    monkeypatch.setattr(ood, "SHIFTS", {name: SHIFTS[name] for name in ("conflicting cue", "noise")})
    monkeypatch.setattr(evals, "all_shifts", lambda: all_shifts((3.0,), size=40))
    asked, reference, test = [], vit(20), SCALE.held_out("test")
    monkeypatch.setattr(evals, "model_of", lambda *arguments: asked.append(arguments) or reference)
    found = under_shifts(models, sources)
    assert asked == [(POOL, sources.place, FILTER, TUNING_SEED)] and list(found) == list(models)
    wrong = (logits_of(reference, test).argmax(1) != test.targets).nonzero().flatten().tolist()
    assert 0 < len(wrong) < len(test)
    sets = {"test_accuracy": test, "filtered": test.select(wrong)}
    sets["unshifted"] = glyph_images(glyphs.generate("test", 40))
    sets |= {f"{name}@3": glyph_images(shifted(name, 3, size=40)) for name in ("conflicting cue", "noise")}
    for name, model in models.items():
        expected = {key: share(logits_of(model, of).argmax(1), of.targets) for key, of in sets.items()}
        assert found[name] == pytest.approx(expected)


@pytest.fixture(scope="module")
def found(models, sources):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evals, "LOOKED_AT", LOOKED_AT)
        return compared(models, sources)


def test_features_and_maps_are_compared_with_the_teachers_and_the_fine_tuned(found, models, sources):
    x = glyph_images(glyphs.generate("test", LOOKED_AT)).take(range(LOOKED_AT))[0]
    walks = {name: seen_by(model, x) for name, model in (models | {"teacher": sources.teacher()}).items()}
    assert set(found) == set(walks)
    for name, seen in walks.items():
        for to in ("teacher", "fine-tune"):
            close(found[name][f"cka to {to}"], cka_of(seen, walks[to]))
        maps, of_teacher = ([layer.map for layer in one.layers] for one in (seen, walks["teacher"]))
        close(found[name]["entropy"], [attention_entropy(p).tolist() for p in maps])
        for pairing, values in found[name]["divergence from teacher"].items():
            close(values, [float(head_divergence(p, q, pairing)) for p, q in zip(maps, of_teacher)])
    assert max(found["copy"]["divergence from teacher"]["direct"]) < 1e-6, "Copy's maps are the teacher's"


def test_predictions_and_probes_by_hand(found, models, sources):
    train, test = SCALE.labelled(0), SCALE.held_out("test")
    p = {name: logits_of(model, test).softmax(-1) for name, model in models.items()}
    guesses = {name: of.argmax(1) for name, of in p.items()}
    for name in models:
        others = [other for other in models if other != name]
        assert found[name]["test_accuracy"] == pytest.approx(share(guesses[name], test.targets))
        apart = {other: 1 - share(guesses[name], guesses[other]) for other in others}
        together = {other: share((p[name] + p[other]).argmax(1), test.targets) for other in others}
        assert found[name]["disagreement"] == pytest.approx(apart)
        assert found[name]["ensemble"] == pytest.approx(together)
    assert "test_accuracy" not in found["teacher"], "it predicts no shapes"
    for name, model in (models | {"teacher": sources.teacher().eval()}).items():
        student = getattr(model, "student", model)
        walked = (seen_by(model, images.take(range(len(images)))[0]) for images in (train, test))
        last = (student.norm(one.stream[-1])[:, 0].detach() for one in walked)
        known, asked = (torch.nn.functional.normalize(x, dim=1) for x in last)
        nearest = train.targets[(asked @ known.T).argmax(1)]
        assert found[name]["k-nn"]["1"] == pytest.approx(share(nearest, test.targets))
        assert 0 <= found[name]["linear probe"] <= 1


def test_painters_are_likened_to_the_teacher_before_and_after(sources, monkeypatch):
    """What is fine-tuned from a painter is stood in for by two models: before is the painter's own file."""
    monkeypatch.setattr(evals, "LOOKED_AT", LOOKED_AT)
    after = {"MAE": vit(21), HEAD_BY_HEAD: vit(22)}
    before = {name: vit(seed, outputs=0) for seed, name in enumerate(after, 31)}
    for name, painter in before.items():
        path = sources.place.teacher(0, PAINTERS[name])
        save_vit(path, painter, Architecture("glyphs", {"num_classes": 0}))
    found = evals.likened_to_the_teacher(after, sources)
    x = glyph_images(glyphs.generate("test", LOOKED_AT)).take(range(LOOKED_AT))[0]
    of_teacher = seen_by(sources.teacher(), x)
    for name in after:
        for when, model in (("before", before[name]), ("after", after[name])):
            close(found[name][f"cka {when} labels"], cka_of(seen_by(model, x), of_teacher))


def test_answers_are_compared_with_the_fine_tuned_teacher_and_tokens_with_each_other(sources, monkeypatch):
    monkeypatch.setattr(evals, "LOOKED_AT", LOOKED_AT)
    monkeypatch.setattr(Sources, "fine_tuned", lambda sources: vit(40))
    models = {"scratch": vit(41), "token": vit(42, distilled=True)}
    found = evals.compared_with_their_teachers(models, sources)
    test = SCALE.held_out("test")
    guesses = {name: logits_of(model, test).argmax(1) for name, model in (models | {"ViT": vit(40)}).items()}
    for name, of in guesses.items():
        expected = {other: 1 - share(of, answers) for other, answers in guesses.items() if other != name}
        assert found[name]["disagreement"] == pytest.approx(expected)
        assert ("cosine" in found[name]) == (name == "token")
    x, student = test.take(range(LOOKED_AT))[0], models["token"]
    streams = [*seen_by(student, x).stream, student.norm(seen_by(student, x).tokens)]
    expected = [torch.cosine_similarity(s[:, 0], s[:, 1]).mean().item() for s in streams]
    assert found["token"]["cosine"] == pytest.approx(expected, abs=1e-5)


def test_branches_of_models_and_groups_of_classes(models, sources, monkeypatch):
    monkeypatch.setattr(evals, "BRANCHES_OF", 8)
    test = SCALE.held_out("test")
    found, x = evals.loudness_of_branches(models, sources), test.take(range(8))[0]
    for name, model in models.items():
        close([*found[name].values()], [of.tolist() for of in branch_ratios(model, x)])
    scale = replace(SCALE, labels=400)
    found = evals.by_class_groups(models, sources._replace(scale=scale))
    groups = class_groups(class_counts(LONG_TAIL.variants[0].images(scale, 0)))
    for name, model in models.items():
        logits = logits_of(model, test)
        expected = group_accuracy(logits, test.targets, groups)
        expected["test_accuracy"] = share(logits.argmax(1), test.targets)
        assert found[name] == pytest.approx(expected)
