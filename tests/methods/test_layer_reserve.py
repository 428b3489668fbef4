"""Keeping the first blocks: what is kept is the pre-trained ViT's, all the rest as it was drawn."""

import pytest
import torch

from atfamily.layer_reserve import keep_first
from atlib import walk
from tests.helpers import random_images, state_of


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
