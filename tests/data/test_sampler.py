"""The order of images: torch's own for any number of processes, every image once, found again later."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, RandomSampler

from atfamily.sentences import Sentences
from atlib.data import Images
from atlib.loading import ShardSpec, epoch_order, my_batches, my_repeats, steps_per_epoch


@pytest.mark.parametrize("count", [1, 7, 8, 33])
def test_the_order_is_that_of_torchs_random_sampler(count):
    """Held independently of `Images.loader`: recorded runs were fed by this sampler."""
    generator = torch.Generator().manual_seed(11)
    sampler = BatchSampler(RandomSampler(range(count), generator=generator), 4, drop_last=False)
    for epoch in range(4):
        drawn = [index for batch in sampler for index in batch]
        assert epoch_order(count, 11, epoch) == drawn


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    count=st.integers(1, 40), batch_size=st.integers(1, 12), world=st.integers(1, 5), epoch=st.integers(0, 2)
)
def test_every_image_comes_once_over_all_processes(count, batch_size, world, epoch):
    shares = [my_batches(count, ShardSpec(1, epoch, batch_size, rank, world)) for rank in range(world)]
    assert {len(of_rank) for of_rank in shares} == {steps_per_epoch(count, batch_size)}, "the same of all"
    order = epoch_order(count, 1, epoch)
    for step, of_step in enumerate(zip(*shares)):
        seen = [index for indices, weight in of_step if weight for index in indices]
        assert sorted(seen) == sorted(order[step * batch_size : (step + 1) * batch_size])
        # a process that is left without an image gets a stand-in
        assert all(len(indices) == 1 for indices, weight in of_step if not weight)
        # The mean over processes of weight · (mean over its images) is the mean over the images.
        value = {index: float(index**2) for index in range(count)}
        means = [weight * sum(value[i] for i in indices) / len(indices) for indices, weight in of_step]
        assert sum(means) / world == pytest.approx(sum(value[index] for index in seen) / len(seen))
        if world == 1:
            assert of_step[0][1] == 1.0


def test_a_start_leaves_out_the_first_steps():
    for rank in range(2):
        part = ShardSpec(3, 1, 8, rank, 2, repeats=3)
        assert my_batches(30, part._replace(start=2)) == my_batches(30, part)[2:]
        assert my_repeats(30, part._replace(start=2)) == my_repeats(30, part)[2:]


def test_repeated_augmentation():
    """A third of the images, three times each; the repeats are numbered and go to different processes."""
    order, plain = epoch_order(30, 3, 1, repeats=3), epoch_order(30, 3, 1)
    assert order == [index for index in plain[:10] for _ in range(3)]
    assert len(epoch_order(31, 3, 1, repeats=3)) == 31
    pairs = [set(), set(), set()]
    for rank in range(3):
        part = ShardSpec(3, 1, 9, rank, 3, repeats=3)
        for (indices, _), repeats in zip(my_batches(30, part), my_repeats(30, part), strict=True):
            pairs[rank] |= set(zip(indices, repeats, strict=True))
    assert sorted(set.union(*pairs)) == sorted((index, repeat) for index in plain[:10] for repeat in range(3))
    assert all(len({index for index, _ in of_rank}) == 10 for of_rank in pairs)


def test_images_hand_out_their_epochs_in_the_order_of_their_loader():
    data = Images(torch.zeros(10, 3, 2, 2, dtype=torch.uint8), torch.arange(10))
    loader = data.loader(4, seed=9)
    for epoch in range(3):
        batches = list(data.epoch(ShardSpec(9, epoch, 4), workers=3))
        assert [batch.targets.tolist() for batch in batches] == [targets.tolist() for _, targets in loader]


def test_sentences_are_handed_out_in_the_order_of_all_data():
    sources, targets = torch.arange(28).view(7, 4), torch.arange(35).view(7, 5)
    data, part = Sentences(sources, targets), ShardSpec(seed=3, epoch=1, batch_size=3)
    batches = list(data.epoch(part))
    assert [(batch.indices, batch.weight) for batch in batches] == my_batches(7, part)
    for batch in batches:
        assert torch.equal(batch.images, sources[batch.indices])
        assert torch.equal(batch.targets, targets[batch.indices])
    assert torch.equal(torch.cat([source for source, _ in data.loader(3)]), sources) and len(data) == 7
