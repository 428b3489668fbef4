"""The studies of a published teacher: with a small one, what each variant is given, and what is measured."""

from dataclasses import replace

import pytest
import torch

from atbook.lab import real, study
from atbook.lab.real import REAL, STUDENTS, Reader, shift_and_flip
from atbook.lab.real_full import REAL_FULL
from atbook.lab.scales import BLANK, GREY, TUNING_SEED, PublishedScale, scales
from atbook.lab.study import Place, Run, Sources, trained
from atbook.records import read_file, unpack_bits
from atfamily.map_cache import fingerprint
from atlib.attention import walk
from atlib.attention_transfer import AttentionTransfer
from atlib.data import Images
from atlib.pair import Pair
from atlib.recipe import Recipe
from atlib.vit import Architecture
from tests.helpers import randomise

SIDE = 32
SMALL = {"img_size": SIDE, "patch_size": 16, "depth": 12, "num_heads": 2, "init_values": 1e-5}


def draw(path, split, number, seed, image_size):
    """Four classes of grey images with noise, of which the folder is none."""
    size = {"train": 12, "validation": 8, "test": 10, "all": 9}[split] if number is None else number
    generator = torch.Generator().manual_seed(seed + len(split))
    classes = torch.arange(size) % 4
    noise = torch.randint(0, 60, (size, 3, image_size, image_size), generator=generator)
    return Images((40 * classes[:, None, None, None] + noise).to(torch.uint8), classes)


SIZES = {"labels": 8, "image_size": SIDE, "held_out_sizes": {"validation": 8, "test": 10}}
SIZES |= {"name": "real-toy", "training": Recipe(steps=2, batch_size=6)}
STUDENT = Architecture({**SMALL, "embed_dim": 16}, {"num_classes": 4})
TOY = replace(scales()["real-cifar10"], student=STUDENT, draw=draw, far={"sketch": draw}, **SIZES)


@pytest.fixture(autouse=True)
def small_teacher(monkeypatch):
    vit = Architecture({**SMALL, "embed_dim": 24}, {"num_classes": 0}).build().eval()
    randomise(vit)
    monkeypatch.setattr(real, "teacher_of", lambda place, image_size: vit)
    monkeypatch.setattr(real, "ARCHITECTURE", Architecture({**SMALL, "embed_dim": 24}, {"num_classes": 0}))
    monkeypatch.setattr(study, "scales", lambda data=None: scales() | {TOY.name: TOY})
    return vit


@pytest.fixture
def place(tmp_path):
    return Place(TOY.name, None, tmp_path / "results", tmp_path / "work")


def run(place, method, study=REAL):
    """A variant trained at a rate that nothing has chosen, its results, and its record's teacher."""
    variant = study.variant(method)
    fixed = replace(variant, trials=({"lr": 1e-3},), changes={**variant.changes, "steps": 2})
    which = Run(replace(study, variants=(fixed,)), place, method, 0)
    model, record = trained(which), which.record()
    said = record.config["recipe"].get("teacher")
    assert said == (fingerprint(model.teacher) if isinstance(model, Pair) else None)
    return model, record.results


def test_a_blank_image_is_the_students_alone():
    sketches = TOY.elsewhere("test", BLANK)["sketch"]
    for images in (TOY.labelled(0, twin=BLANK), TOY.held_out("test", BLANK), sketches):
        assert (images.pixels[:, 0] == GREY).all() and images.pixels[:, 1].float().std() > 0
    assert torch.equal(TOY.labelled(0, twin=BLANK).pixels[:, 1], TOY.labelled(0).pixels)
    worlds = scales()["find"]
    assert torch.equal(worlds.labelled(0, 9, BLANK).pixels[:, 1], worlds.labelled(0, 9).pixels)
    assert (worlds.labelled(0, 9, BLANK).pixels[:, 0] == GREY).all()


@pytest.mark.parametrize("method", [*STUDENTS, "distill, same class", "copy, other class"])
def test_what_is_measured_on_a_student(place, method):
    model, results = run(place, method)
    other = {"copy, blank image": {"photograph"}, "copy": {"blank"}, "distill": {"blank"}}.get(method, set())
    sets = {"test", "test_sketch"}
    wanted = {f"{name}_{figure}" for name in sets for figure in ("accuracy", "loss")} | {"test_right"}
    assert results.keys() == wanted | {f"{name}_{kind}_accuracy" for name in sets for kind in other}
    twin = REAL.variant(method).twin
    images = TOY.held_out("test", twin)
    with torch.no_grad():
        seen = images.take(range(10))[0]
        logits = model.eval()(seen)
    guesses = (logits.logits if isinstance(model, AttentionTransfer) else logits).argmax(1)
    assert (guesses == images.targets).tolist() == unpack_bits(results["test_right"]).tolist()
    if method == "distill":  # which has pixels alone: to all blank images it says the same
        shares = torch.bincount(images.targets) / 10
        assert min((shares - results["test_blank_accuracy"]).abs()) < 1e-6


@pytest.mark.parametrize("variant", REAL_FULL.variants, ids=lambda variant: variant.name)
def test_with_all_labels_and_students_of_the_teachers_size_every_variant_trains(place, variant, monkeypatch):
    student = Architecture({**SMALL, "embed_dim": 24, "init_values": None}, {"num_classes": 4})
    toy = replace(TOY, student=student, padding=3)
    monkeypatch.setattr(study, "scales", lambda data=None: {TOY.name: toy})
    _, results = run(place, variant.name, REAL_FULL)
    other = {"copy": "blank", "distill": "blank", "copy, blank image": "photograph"}.get(variant.name)
    assert 0 <= results["test_accuracy"] <= 1 and (not other or f"test_{other}_accuracy" in results)


def test_a_class_mean_is_that_of_the_training_images_of_the_class(place, small_teacher):
    model, _ = run(place, "distill, mean map of the class")
    known, asked = TOY.labelled(0), TOY.held_out("test")
    images, _ = known.take(range(8))
    with torch.no_grad():
        maps = [seen.map for seen in walk(small_teacher, images, head=False).layers]
    label = next(label for label in asked.targets.tolist() if label in known.targets.tolist())
    (at, *_) = (asked.targets == label).nonzero().flatten().tolist()
    given = model._maps(asked.take([at])[0])
    for layer, of_layer in enumerate(maps):
        mean = of_layer[known.targets == label].mean(0, keepdim=True)
        torch.testing.assert_close(given[layer], mean, rtol=2e-3, atol=1e-5)


def test_maps_of_all_that_shifts_make_are_stored(place):
    images = TOY.labelled(0)
    views = torch.cat([*real._views(images, shifts=True)])
    assert len(views) == 8 * 5 * 2
    seeds = torch.arange(200).split(8)
    changed = torch.cat([shift_and_flip(images.pixels, some) for some in seeds])
    taken = replace(images, pixels=changed[:8]).take(range(8))[0]
    assert all((views == one).flatten(1).all(1).any() for one in taken)
    assert len({tuple(one.flatten().tolist()) for one in changed}) > 8 * 5, "several shifts of each"
    _, results = run(place, "copy, shifts")
    assert "test_accuracy" in results


@pytest.mark.parametrize("of", ["maps", "features"])
def test_a_reader_reads_what_it_is_said_to(place, small_teacher, of):
    sources = Sources(place, TOY, 0)
    reader = REAL.variant(f"linear reader of {of}").build(sources)
    assert isinstance(reader, Reader)
    images, _ = TOY.labelled(0).take(range(8))
    with torch.no_grad():
        seen = walk(small_teacher, images)
        maps = torch.stack([layer.map for layer in seen.layers], 1).flatten(1)
        said = maps if of == "maps" else seen.logits
        standardised = (said - said.mean(0)) / said.std(0).where(said.std(0) > 0, 1)
        nn_weight = torch.randn_like(reader.linear.weight)
        reader.linear.weight.copy_(nn_weight)
        torch.testing.assert_close(reader(images), standardised @ nn_weight.T, rtol=1e-2, atol=0.5)
    _, results = run(place, f"linear reader of {of}")
    assert results.keys() >= {"test_accuracy", "test_sketch_accuracy"}


def test_tuning_sees_no_test_image(place, monkeypatch):
    variant = REAL.variant("copy")
    few = replace(variant, trials=({"lr": 1e-3}, {"lr": 2e-3}), changes={"steps": 1})
    asked = []
    for name in ("held_out", "elsewhere"):
        plain = getattr(PublishedScale, name)
        noted = lambda self, split, twin=None, plain=plain: asked.append(split) or plain(self, split, twin)  # noqa: E731
        monkeypatch.setattr(PublishedScale, name, noted)
    trained(Run(replace(REAL, variants=(few,)), place, "copy", TUNING_SEED, 1))
    assert set(asked) == {"validation"}
    (record,) = read_file(place.records("real"))
    assert record.config["recipe"]["lr"] == 2e-3 and "validation_accuracy" in record.results
