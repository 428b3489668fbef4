"""A class token that comes late: at layer 0 it is timm's ViT, else it is no part of the layers before."""

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer

from atfamily.late_class import LateClassViT
from atlib import AttentionTransfer, Plan, walk
from atlib.attention import Unwalkable
from tests.helpers import DROPS, SMALL_VIT, random_images, randomise

IMAGES = random_images(3, 3, 32, 32, dtype=torch.float64)


def late(insert_at, **options):
    return randomise(LateClassViT(insert_at, **SMALL_VIT | options)).double().eval()


@pytest.mark.parametrize(
    "options", [{}, {"pre_norm": True, "init_values": 0.1}, DROPS], ids=["plain", "more", "drops"]
)
def test_at_layer_0_it_is_timms(options):
    vit, timms = late(0, **options), randomise(VisionTransformer(**SMALL_VIT | options)).double()
    assert list(vit.state_dict()) == list(timms.state_dict())
    for model in (vit, timms):
        model.train(options is DROPS)
    logits = []
    for model in (vit, timms):
        torch.manual_seed(3)
        logits.append(model(IMAGES))
    assert torch.equal(*logits)


@pytest.mark.parametrize("insert_at", [1, 2])
def test_before_it_joins_the_patches_are_alone(insert_at):
    """By hand: the early blocks on patches, the late ones on all, the head on the class token."""
    vit = late(insert_at)
    x = vit.patch_embed(IMAGES) + vit.pos_embed[:, 1:]
    for block in vit.blocks[:insert_at]:
        x = block(x)
    x = torch.cat([(vit.cls_token + vit.pos_embed[:, :1]).expand(3, -1, -1), x], 1)
    for block in vit.blocks[insert_at:]:
        x = block(x)
    expected = vit.head(vit.norm(x)[:, 0])
    assert (vit(IMAGES) - expected).abs().max() <= 1e-12
    assert not torch.allclose(late(0)(IMAGES), expected)
    vit(IMAGES).sum().backward()
    assert all((parameter.grad != 0).any() for parameter in vit.parameters())


def test_a_walk_sees_its_layers_and_a_pair_refuses_them():
    """Without the class token there is a token less."""
    vit = late(1)
    seen = walk(vit, IMAGES)
    assert torch.equal(seen.logits, vit(IMAGES))
    assert [layer.map.shape[-1] for layer in seen.layers] == [16, 17, 17]
    with pytest.raises(Unwalkable):
        AttentionTransfer(vit, late(1), Plan())
