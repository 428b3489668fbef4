"""What the book measures on trained models: each figure against the same figure made the long way."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from scipy.optimize import linear_sum_assignment

from atbook.lab import evals
from atbook.lab.evals import (
    FILTER,
    by_class_groups,
    compared,
    compared_with_their_teachers,
    likened_to_the_teacher,
    loudness_of_branches,
    under_shifts,
)
from atbook.lab.scales import TUNING_SEED
from atbook.lab.studies import HEAD_BY_HEAD, LONG_TAIL, PAINTERS, POOL
from atbook.lab.study import Sources
from atbook.worlds import glyph_images, glyphs
from atbook.worlds import shifts as ood
from atbook.worlds.shifts import SHIFTS, all_shifts, shifted
from atlib import AttentionTransfer, Plan, create_vit, walk
from atlib.checkpoint import save_vit
from atlib.vit import Architecture
from tests import toy
from tests.helpers import randomise

SCALE = replace(toy.TOY, labels=80)


def vit(seed, outputs=8):
    return randomise(create_vit("glyphs", num_classes=outputs), seed).eval()


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


def logits_of(model, images):
    """Of a pair: the student's, with the teacher's maps where it copies."""
    x = images.take(range(len(images)))[0]
    with torch.no_grad():
        output = model(x)
    return getattr(output, "logits", output)


def share(guesses, labels):
    return sum(guess == label for guess, label in zip(guesses.tolist(), labels.tolist(), strict=True)) / len(
        labels
    )


def test_a_probe_reads_shape_and_place_from_maps_that_have_them(sources, monkeypatch):
    """The teacher is replaced by maps that say what is in the image that it is shown: of itself both can be
    named, of a routing twin the place alone, of a message twin the shape alone."""

    def maps(vit, images):
        drawn = next(
            walked for walked in seen if walked.images.shape[0] == len(images) and same_images(walked, images)
        )
        shape, cell = (
            torch.nn.functional.one_hot(torch.from_numpy(getattr(drawn, name)), number)
            for name, number in (("shape", 8), ("cell", 16))
        )
        return torch.cat([shape, cell], 1).float()

    def same_images(drawn, images):
        return torch.equal(torch.from_numpy(drawn.images), images.pixels)

    seen, generate = [], evals.glyphs.generate
    monkeypatch.setattr(evals.glyphs, "generate", lambda *given: seen.append(generate(*given)) or seen[-1])
    monkeypatch.setattr(evals, "_maps_of", maps)
    monkeypatch.setattr(evals, "PROBED", {"train": 800, "test": 400})
    monkeypatch.setattr(evals, "mlp_probe", partial(evals.mlp_probe, steps=150))
    found = evals.named_from_maps({"copy": None}, sources)["copy"]
    assert found["itself"] == found["distractors"] == {"shape": 1.0, "cell": 1.0}
    assert found["routing"]["cell"] == 1.0 and found["routing"]["shape"] < 0.25
    assert found["message"]["shape"] == 1.0 and found["message"]["cell"] < 0.15


# --- shifts


@pytest.fixture
def few_shifts(monkeypatch):
    """Two shifts at one severity, of 40 images."""
    monkeypatch.setattr(ood, "SHIFTS", {name: SHIFTS[name] for name in ("conflicting cue", "noise")})
    monkeypatch.setattr(evals, "all_shifts", lambda: all_shifts((3.0,), size=40))


def test_under_shifts_by_hand(models, sources, few_shifts, monkeypatch):
    asked, reference, test = [], vit(20), SCALE.held_out("test")
    monkeypatch.setattr(evals, "model_of", lambda *arguments: asked.append(arguments) or reference)
    found = under_shifts(models, sources)
    assert asked == [(POOL, sources.place, FILTER, TUNING_SEED)] and list(found) == list(models)
    wrong = [
        index
        for index, logits in enumerate(logits_of(reference, test))
        if logits.argmax() != test.targets[index]
    ]
    sets = {
        "unshifted": glyph_images(glyphs.generate("test", 40)),
        "test_accuracy": test,
        "filtered": test.select(wrong),
    }
    sets |= {f"{name}@3": glyph_images(shifted(name, 3, size=40)) for name in ("conflicting cue", "noise")}
    for name, model in models.items():
        assert found[name] == {
            key: share(logits_of(model, images).argmax(1), images.targets) for key, images in sets.items()
        }
    assert 0 < len(wrong) < len(test)


# --- likeness

LOOKED_AT = 12


def cka(x, y):
    """Linear CKA with centring matrices, as the paper's HSIC writes it."""
    n = len(x)
    H = torch.eye(n, dtype=torch.float64) - 1 / n
    K, L = (H @ (z.double() @ z.double().T) @ H for z in (x, y))
    return ((K * L).sum() / (K.norm() * L.norm())).item()


def jsd(p, q):
    """Jensen-Shannon divergence of two rows."""
    terms = [
        (a * math.log(2 * a / (a + b)) if a else 0.0) + (b * math.log(2 * b / (a + b)) if b else 0.0)
        for a, b in zip(p.tolist(), q.tolist())
    ]
    return sum(terms) / 2


def seen_by(model, x):
    with torch.no_grad():
        return model.walk(x) if hasattr(model, "walk") else walk(model, x)


@pytest.fixture(scope="module")
def found(models, sources):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evals, "LOOKED_AT", LOOKED_AT)
        return compared(models, sources)


def test_compared_features_and_maps_by_hand(found, models, sources):
    x = glyph_images(glyphs.generate("test", LOOKED_AT)).take(range(LOOKED_AT))[0]
    teacher = sources.teacher().eval()
    walks = {name: seen_by(model, x) for name, model in (models | {"teacher": teacher}).items()}
    assert set(found) == set(walks)
    for name, seen in walks.items():
        for to in ("teacher", "fine-tune"):
            expected = [[cka(a[:, 0], b[:, 0]) for b in walks[to].stream] for a in seen.stream]
            torch.testing.assert_close(
                torch.tensor(found[name][f"cka to {to}"]), torch.tensor(expected), rtol=1e-4, atol=1e-5
            )
        for layer in range(4):
            p, q = (walked.layers[layer].map.double() for walked in (seen, walks["teacher"]))
            entropy = [
                sum(-(row * row.log()).sum().item() for row in p[:, head].flatten(0, 1)) / (LOOKED_AT * 17)
                for head in range(4)
            ]
            assert found[name]["entropy"][layer] == pytest.approx(entropy, rel=1e-4)
            heads = (
                torch.tensor(
                    [
                        [
                            sum(jsd(a, b) for a, b in zip(p[:, i].flatten(0, 1), q[:, j].flatten(0, 1)))
                            / (LOOKED_AT * 17)
                            for j in range(4)
                        ]
                        for i in range(4)
                    ]
                )
                if layer == 2 and name in ("distill", "copy")
                else None
            )
            if heads is not None:
                divergence = {
                    pairing: values[layer]
                    for pairing, values in found[name]["divergence from teacher"].items()
                }
                assert divergence["direct"] == pytest.approx(heads.diagonal().mean().item(), abs=1e-6)
                assert divergence["bipartite"] == pytest.approx(
                    heads[linear_sum_assignment(heads)].mean().item(), abs=1e-6
                )
                assert divergence["minimum"] == pytest.approx(heads.min(1).values.mean().item(), abs=1e-6)
    assert all(value < 1e-6 for value in found["copy"]["divergence from teacher"]["direct"]), (
        "Copy's maps are the teacher's"
    )
    assert [found["teacher"]["cka to teacher"][layer][layer] for layer in range(4)] == pytest.approx([1] * 4)


def test_compared_predictions_by_hand(found, models, sources):
    test = SCALE.held_out("test")
    p = {name: logits_of(model, test).softmax(-1) for name, model in models.items()}
    guesses = {name: probabilities.argmax(1) for name, probabilities in p.items()}
    for name in models:
        others = [other for other in models if other != name]
        assert found[name]["test_accuracy"] == pytest.approx(share(guesses[name], test.targets))
        assert found[name]["disagreement"] == pytest.approx(
            {other: 1 - share(guesses[name], guesses[other]) for other in others}
        )
        assert found[name]["ensemble"] == pytest.approx(
            {other: share(((p[name] + p[other]) / 2).argmax(1), test.targets) for other in others}
        )
        bins = [[] for _ in range(15)]
        for row, label in zip(p[name], test.targets):
            bins[math.ceil(15 * row.max().item()) - 1].append(
                (row.max().item(), float(row.argmax() == label))
            )
        gaps = [abs(sum(sure for sure, _ in each) - sum(right for _, right in each)) for each in bins]
        assert found[name]["calibration error"] == pytest.approx(sum(gaps) / len(test), rel=1e-5)
    assert not {"test_accuracy", "disagreement", "ensemble", "calibration error"} & set(found["teacher"]), (
        "it predicts no shapes"
    )


def test_compared_probes_by_hand(found, models, sources):
    """The nearest neighbour's label, read off the final class tokens; the labels are those that students
    train on."""
    train, test = SCALE.labelled(0), SCALE.held_out("test")
    for name, model in (models | {"teacher": sources.teacher().eval()}).items():
        student = getattr(model, "student", model)
        with torch.no_grad():
            x = [
                student.norm(seen_by(model, images.take(range(len(images)))[0]).stream[-1])[:, 0]
                for images in (train, test)
            ]
        x = [features / features.norm(dim=1, keepdim=True) for features in x]
        assert found[name]["k-nn"]["1"] == pytest.approx(
            share(train.targets[(x[1] @ x[0].T).argmax(1)], test.targets)
        )
        assert (
            set(found[name]["k-nn"]) == {"1", "5", "10", "20", "50"} and 0 <= found[name]["linear probe"] <= 1
        )


def test_painters_are_likened_to_the_teacher_before_and_after_by_hand(models, sources, monkeypatch):
    """What is fine-tuned from a painter is stood in for by two models: before is the painter's own file."""
    monkeypatch.setattr(evals, "LOOKED_AT", LOOKED_AT)
    after = {"MAE": vit(21), HEAD_BY_HEAD: vit(22)}
    before = {name: vit(seed, outputs=0) for seed, name in enumerate(after, 31)}
    for name, painter in before.items():
        save_vit(
            sources.place.teacher(0, PAINTERS[name]), painter, Architecture("glyphs", {"num_classes": 0})
        )
    found = likened_to_the_teacher(after, sources)
    x = glyph_images(glyphs.generate("test", LOOKED_AT)).take(range(LOOKED_AT))[0]
    of_teacher = seen_by(sources.teacher().eval(), x).stream
    for name in after:
        for when, model in (("before", before[name]), ("after", after[name])):
            expected = [[cka(a[:, 0], b[:, 0]) for b in of_teacher] for a in seen_by(model, x).stream]
            torch.testing.assert_close(
                torch.tensor(found[name][f"cka {when} labels"]), torch.tensor(expected), rtol=1e-4, atol=1e-5
            )


def test_answers_are_compared_with_the_fine_tuned_teacher_and_tokens_with_each_other(sources, monkeypatch):
    monkeypatch.setattr(evals, "LOOKED_AT", LOOKED_AT)
    monkeypatch.setattr(Sources, "fine_tuned", lambda sources: vit(40))
    models = {
        "scratch": vit(41),
        "token": randomise(create_vit("glyphs", num_classes=8, distilled=True), 42).eval(),
    }
    found = compared_with_their_teachers(models, sources)
    test = SCALE.held_out("test")
    answers = {name: logits_of(model, test).argmax(1) for name, model in {**models, "ViT": vit(40)}.items()}
    assert set(found) == set(answers)
    for name, theirs in answers.items():
        assert found[name]["disagreement"] == pytest.approx(
            {
                other: (theirs != of_other).double().mean().item()
                for other, of_other in answers.items()
                if other != name
            }
        )
    x, student = test.take(range(LOOKED_AT))[0], models["token"]
    streams = [*seen_by(student, x).stream, student.norm(seen_by(student, x).tokens)]
    expected = [torch.cosine_similarity(s[:, 0], s[:, 1]).mean().item() for s in streams]
    assert found["token"]["cosine"] == pytest.approx(expected, abs=1e-5)
    assert not any("cosine" in found[name] for name in ("scratch", "ViT"))


def test_branches_are_as_loud_as_blocks_make_them(models, sources, monkeypatch):
    monkeypatch.setattr(evals, "BRANCHES_OF", 8)
    x = SCALE.held_out("test").take(range(8))[0]
    alone = models["fine-tune"]
    found = loudness_of_branches({"fine-tune": alone, "copy": models["copy"]}, sources)
    stream, of_attention = alone.norm_pre(alone._pos_embed(alone.patch_embed(x))), []
    with torch.no_grad():
        for block in alone.blocks:
            branch = block.attn(block.norm1(stream))
            of_attention.append((branch.norm(dim=-1) / stream.norm(dim=-1)).mean().item())
            stream = block(stream)
    assert found["fine-tune"]["attention"] == pytest.approx(of_attention, rel=1e-4)
    assert {len(branch) for branch in found["copy"].values()} == {4}


# --- classes with many, some and few images


def test_by_class_groups_by_counting(sources):
    scale = replace(SCALE, labels=400)
    models, test = (
        {"scratch": vit(1), "copy": AttentionTransfer(sources.teacher(), vit(2), Plan()).eval()},
        SCALE.held_out("test"),
    )
    found = by_class_groups(models, sources._replace(scale=scale))
    counts = [LONG_TAIL.variants[0].images(scale, 0).targets.tolist().count(label) for label in range(8)]
    group_of = ["many" if count > 100 else "few" if count < 20 else "medium" for count in counts]
    assert set(group_of) == {"many", "medium", "few"}
    for name, model in models.items():
        guesses = logits_of(model, test).argmax(1)
        expected = {"test_accuracy": share(guesses, test.targets)}
        for group in ("many", "medium", "few"):  # every class of a group weighs the same
            places = [
                [index for index, label in enumerate(test.targets.tolist()) if label == wanted]
                for wanted in range(8)
                if group_of[wanted] == group
            ]
            of_classes = [share(guesses[of_class], test.targets[of_class]) for of_class in places if of_class]
            expected[group] = sum(of_classes) / len(of_classes)
        assert found[name] == pytest.approx(expected)


# --- the list
