"""Images in memory, their batches, and loading by name; what the `datasets` library reads is in
test_hub.py."""

import numpy as np
import pytest
import torch

from atlib.data import Images, crop_and_flip
from atlib.loading import ShardSpec, my_batches, my_repeats


def numbered(n=20, **options):
    """Images whose every pixel is their index, and so is their target."""
    index = torch.arange(n)
    return Images(
        index.to(torch.uint8)[:, None, None, None].expand(n, 3, 4, 4).contiguous(), index, **options
    )


def seen_in(loader):
    """The targets of one epoch, batch by batch, after a check that every image came with its own target."""
    batches = []
    for images, targets in loader:
        assert torch.equal(
            ((images * 0.25 + 0.5) * 255).round().long(), targets[:, None, None, None].expand_as(images)
        )
        batches.append(targets.tolist())
    return batches


def test_take_is_a_batch_in_the_order_asked_for():
    images, targets = numbered().take([7, 0, 7])
    assert images.shape == (3, 3, 4, 4) and targets.tolist() == [7, 0, 7]
    assert images[0, 0, 0, 0].item() == pytest.approx((7 / 255 - 0.5) / 0.25)
    other = Images(numbered().pixels, numbered().targets, mean=0.0, std=1.0)
    assert other.take([7])[0].unique().item() == pytest.approx(7 / 255)


def test_with_a_seed_every_epoch_is_another_order_of_all_images():
    def epochs(seed):
        loader = numbered(20).loader(6, seed=seed)
        return [seen_in(loader) for _ in range(3)]

    first = epochs(3)
    for batches in first:
        assert [len(batch) for batch in batches] == [6, 6, 6, 2]
        assert sorted(sum(batches, [])) == list(range(20))
    assert first[0] != first[1] != first[2] != first[0]
    torch.manual_seed(99)  # the order hangs on the loader's seed alone
    assert epochs(3) == first and epochs(4) != first


def test_an_epoch_hands_out_the_images_at_its_indices():
    part = ShardSpec(2, 1, 6, rank=1, world=2)
    batches = list(numbered().epoch(part))
    assert [(batch.indices, batch.weight) for batch in batches] == my_batches(20, part)
    assert [indices for indices, _ in my_batches(20, part)] == seen_in(
        (batch.images, batch.targets) for batch in batches
    )


def noisy(images, seeds):
    """Another image for every seed."""
    generators = [torch.Generator().manual_seed(seed) for seed in seeds.tolist()]
    drawn = [torch.randint(0, 256, images.shape[1:], generator=generator) for generator in generators]
    return torch.stack(drawn).to(torch.uint8)


def test_augmentation_hangs_on_run_epoch_image_and_repeat_alone():
    """Not on processes, where an epoch is taken up again or what was drawn elsewhere; and no generator of
    others moves."""

    def augmented(world=1, **part):
        """{(index, how often it came before): what it looks like}"""
        seen = {}
        for rank in range(world):
            spec = ShardSpec(**({"seed": 3, "epoch": 1, "batch_size": 6, "repeats": 2} | part))
            spec = spec._replace(rank=rank, world=world)
            repeats = my_repeats(20, spec)
            for batch, of_batch in zip(numbered(augment=noisy).epoch(spec), repeats, strict=True):
                seen |= dict(zip(zip(batch.indices, of_batch), (image.tolist() for image in batch.images)))
        return seen

    torch.manual_seed(5)
    before = torch.get_rng_state()
    whole = augmented()
    assert len(whole) == 20 and len({str(image) for image in whole.values()}) == 20
    assert augmented(world=3) == whole
    assert len(augmented(start=2)) == 8 and augmented(start=2).items() <= whole.items()
    assert torch.equal(torch.get_rng_state(), before)
    for other in (augmented(epoch=2), augmented(seed=4)):
        assert not any(other[which] == whole[which] for which in other.keys() & whole.keys())


def test_only_an_epoch_is_augmented():
    before = torch.get_rng_state()
    data = numbered(20, augment=noisy)
    assert seen_in(data.loader(8)) == [[*range(8)], [*range(8, 16)], [*range(16, 20)]]
    assert torch.equal(torch.get_rng_state(), before), (
        "else evaluating in a training run would change the run"
    )
    assert torch.equal(data.take([7])[0], numbered().take([7])[0])
    plain = data.with_augment(None)
    assert plain.augment is None and data.augment is noisy
    assert torch.equal(
        next(plain.epoch(ShardSpec(0, 0, 20))).images, next(numbered().epoch(ShardSpec(0, 0, 20))).images
    )


def test_crop_and_flip_cuts_from_the_padded_image():
    """Every outcome is one of the 2 x 81 windows of the reflected image, drawn about equally often."""
    image = torch.arange(3 * 16 * 16).reshape(3, 16, 16).to(torch.uint8)
    # four pixels reflected at either end, the edge itself once
    index = [4, 3, 2, 1, *range(16), 14, 13, 12, 11]
    padded = image[:, index][:, :, index]
    windows = [
        window.flip(-1) if flip else window
        for top in range(9)
        for left in range(9)
        for window in [padded[:, top : top + 16, left : left + 16]]
        for flip in (False, True)
    ]
    keys = {window.contiguous().numpy().tobytes(): number for number, window in enumerate(windows)}
    assert len(keys) == 162
    augment, seeds, many = crop_and_flip(4), torch.arange(8100), image.expand(8100, -1, -1, -1)
    cut = augment(many, seeds)
    assert cut.shape == (8100, 3, 16, 16) and cut.dtype == torch.uint8
    drawn = [keys[image.contiguous().numpy().tobytes()] for image in cut]
    counts = np.bincount(drawn, minlength=162)
    # chi-squared with 161 degrees of freedom: mean 161, standard deviation 18
    assert ((counts - 50) ** 2 / 50).sum() < 161 + 4 * 18
    assert torch.equal(image, torch.arange(3 * 16 * 16).reshape(3, 16, 16).to(torch.uint8))
    some = [7, 4000, 12]
    assert torch.equal(augment(many[:3], seeds[some]), cut[some]), "whatever batch an image is in"


def test_images_are_augmented_where_they_are():
    """On a device without data, where nothing may ask for a value: an epoch there has the same shapes."""
    data = Images(torch.zeros(20, 2, 3, 8, 8, dtype=torch.uint8), torch.arange(20), ("a",), 0.1, 0.9)
    moved = data.with_augment(crop_and_flip()).to("meta")
    assert (moved.classes, moved.mean, moved.std, len(moved)) == (("a",), 0.1, 0.9, 20)
    for batch, (indices, _) in zip(moved.epoch(ShardSpec(0, 0, 6)), my_batches(20, ShardSpec(0, 0, 6))):
        assert batch.images.device.type == batch.targets.device.type == "meta"
        assert batch.images.shape == (len(indices), 2, 3, 8, 8) and batch.images.dtype == torch.float32
        assert batch.indices == indices
    assert torch.equal(data.to("cpu").take([3])[0], data.take([3])[0])
