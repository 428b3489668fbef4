"""The study of augmentation: what is changed, what is left, and that nothing else differs."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from atbook.lab import study as runner
from atbook.lab.as_pictures import as_pictures
from atbook.lab.augmented import AUGMENTATION, MIXUP, rand_augment, three_augment
from atbook.lab.scales import scales
from atbook.lab.study import Sources, run_study
from atbook.records import read_file
from atbook.worlds import glyphs
from atlib import AttentionTransfer
from tests import toy

DRAWN = glyphs.generate("train", 300)
SCENES, SEEDS = torch.from_numpy(DRAWN.images), torch.arange(300) * 7919


def mark_found(images):
    return (glyphs.marked_cell(images).numpy() == DRAWN.cell).mean()


@pytest.mark.parametrize("make", [three_augment, rand_augment])
def test_the_mark_stays_where_it_is(make):
    changed = as_pictures(make())(SCENES, SEEDS)
    different = (changed != SCENES).flatten(1).any(1)
    assert mark_found(changed) >= 0.99 and different.float().mean() > 0.5


def test_what_was_left_out_takes_the_mark_away():
    """Solarised, light dots are as dark as the ground; blurred over two pixels, they are no dots."""
    solarised = as_pictures(lambda picture: ImageOps.solarize(picture, 128))(SCENES, SEEDS)
    assert mark_found(solarised) < 0.2


def test_one_of_two_operations_a_picture():
    """Grey pictures have three equal channels; blurred ones have the same means, but less noise."""
    changed = as_pictures(three_augment())(SCENES, SEEDS).float()
    grey = (changed == changed.mean(1, keepdim=True)).flatten(1).all(1)
    assert 110 < grey.sum() < 190
    blurred, before = changed[~grey], SCENES[~grey].float()
    assert (blurred.mean((2, 3)) - before.mean((2, 3))).abs().max() < 3
    assert (blurred.flatten(1).std(1) < before.flatten(1).std(1) + 0.1).all(), "levels are whole"


def test_variants_differ_in_what_their_names_say(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "scales", toy.known)
    place = toy.place(tmp_path)
    toy.untrained_models(place)
    sources = Sources(place, toy.TOY, 0)
    plain = toy.TOY.labelled(0)
    for variant in AUGMENTATION.variants:
        model = variant.build(sources)
        assert isinstance(model, AttentionTransfer) == (variant.differs["method"] == "copy")
        mixes = variant.differs["augmentation"] == "mixup"
        assert variant.changes == ({"mixup": MIXUP} if mixes else {})
        assert (variant.images is None) == mixes and variant.twin is None
        if variant.images is not None:
            images = variant.images(toy.TOY, 0)
            assert torch.equal(images.pixels, plain.pixels) and images.augment is not None


def test_they_search_as_what_they_are_compared_with():
    find = scales()["find"]
    for variant in AUGMENTATION.variants:
        assert variant.choices(find) == find.tuning[variant.differs["method"]]
        assert variant.like is None


def test_a_run_leaves_a_record(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "scales", toy.known)
    place = toy.place(tmp_path)
    toy.untrained_models(place)
    monkeypatch.setattr(runner.Variant, "choices", lambda self, scale: ({},))
    run_study(runner.replace(AUGMENTATION, only=()), place, seeds=1)
    records = read_file(place.records("augmentation"))
    assert [record.method for record in records] == [variant.name for variant in AUGMENTATION.variants]
    assert [record.config["recipe"]["mixup"] for record in records] == [0.0, 0.0, MIXUP, 0.0]


def test_pictures_hang_on_the_seed_of_the_image_alone():
    noisy = as_pictures(lambda picture: Image.fromarray(np.random.randint(0, 255, (32, 32, 3), np.uint8)))
    torch.manual_seed(3)
    np.random.seed(3)
    after = np.random.rand()
    np.random.seed(3)
    all_at_once = noisy(SCENES[:8], SEEDS[:8])
    assert np.random.rand() == after, "the global generator goes on as if nothing had been drawn"
    assert torch.equal(noisy(SCENES[3:5], SEEDS[3:5]), all_at_once[3:5])
    assert all_at_once.dtype == torch.uint8 and all_at_once.shape == (8, 3, 32, 32)
    assert not torch.equal(all_at_once[0], all_at_once[1])


def test_pictures_keep_rows_columns_and_channels():
    assert torch.equal(as_pictures(lambda picture: picture)(SCENES, SEEDS), SCENES)
    mirrored = as_pictures(ImageOps.mirror)(SCENES, SEEDS)
    assert torch.equal(mirrored, SCENES.flip(3))


def test_pairs_are_no_pictures():
    with pytest.raises(ValueError, match="pictures have 3 channels, got images .2, 6, 32, 32."):
        as_pictures(lambda picture: picture)(torch.zeros(2, 6, 32, 32, dtype=torch.uint8), SEEDS[:2])
