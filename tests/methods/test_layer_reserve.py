"""Keeping the first blocks: what is kept is the pre-trained ViT's, all the rest as it was drawn."""

import pytest
import torch

from atfamily.layer_reserve import keep_first
from atlib import create_vit, walk
from tests.helpers import SMALL_VIT, random_images, randomise, state_of


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("options", [{}, {"reg_tokens": 2, "pre_norm": True}], ids=str)
def test_the_stream_is_the_pretrained_ones_up_to_the_last_kept_block(small_vit, number, options):
    pretrained, fresh = small_vit(1, **options, num_classes=7), small_vit(2, **options)
    before, images = state_of(fresh), random_images(2, 3, 32, 32)
    found = keep_first(pretrained, fresh, number)
    assert found is fresh and found.head.out_features == 5
    with torch.no_grad():
        ours, theirs = (walk(vit, images).stream for vit in (found, pretrained))
    equal = [torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)]
    assert equal == [True] * number + [False] * (3 - number)
    assert torch.equal(found.cls_token, pretrained.cls_token)
    later = [f"blocks.{layer}." for layer in range(number, 3)]
    for name, weight in found.state_dict().items():
        if name.startswith((*later, "norm.", "head.")):
            assert torch.equal(weight, before[name]), name
    assert all(parameter.requires_grad for parameter in found.parameters())


def test_what_is_kept_is_a_copy(small_vit):
    pretrained = small_vit(1)
    before = state_of(pretrained)
    found = keep_first(pretrained, small_vit(2), 3)
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.add_(1)
    assert all(torch.equal(weight, before[name]) for name, weight in pretrained.state_dict().items())


def test_block_ten_is_not_among_the_first_two():
    pretrained, fresh = (
        randomise(create_vit(SMALL_VIT | {"depth": 12, "embed_dim": 6}), seed) for seed in (1, 2)
    )
    before = fresh.blocks[10].mlp.fc1.weight.clone()
    assert torch.equal(keep_first(pretrained, fresh, 2).blocks[10].mlp.fc1.weight, before)


@pytest.mark.parametrize(
    "changes, number, words",
    [
        ({}, 4, ["first 4", "has 3"]),
        ({}, -1, ["first -1"]),
        ({"depth": 2}, 1, ["has 3", "2"]),
        ({"embed_dim": 48}, 0, ["24", "48"]),
        ({"class_token": False, "global_pool": "avg"}, 1, ["cls_token", "None"]),
        ({"reg_tokens": 1}, 1, ["pos_embed", "17", "18"]),
    ],
    ids=str,
)
def test_what_cannot_be_kept_is_named(small_vit, changes, number, words):
    fresh = small_vit(2, **changes)
    before = state_of(fresh)
    with pytest.raises(ValueError) as caught:
        keep_first(small_vit(1), fresh, number)
    assert all(word in str(caught.value) for word in words)
    assert all(torch.equal(weight, before[name]) for name, weight in fresh.state_dict().items())
