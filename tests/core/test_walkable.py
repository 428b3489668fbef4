"""What cannot be walked faithfully is refused with one sentence; what libraries leave out is switched on."""

from functools import partial
from types import SimpleNamespace

import pytest
import timm
import torch
from timm.models.vision_transformer import Block, DiffParallelScalingBlock
from torch import nn

from atlib import AttentionTransfer, Plan, create_vit, walk
from atlib.attention import SDPA, Unwalkable, outputs
from tests.helpers import SMALL_VIT, random_images, randomise

SMALL = SMALL_VIT | {"depth": 2}
IMAGES = random_images(2, 3, 32, 32)


def of_timm(name, **options):
    return partial(timm.create_model, name, num_classes=5, **options)


class OwnSoftmax(Block):
    """A block that writes its softmax itself."""

    def forward(self, x, **options):
        q = self.norm1(x)
        return x + (q @ q.mT).softmax(-1) @ q


def with_one_of_its_own():
    vit = create_vit(SMALL)
    vit.blocks[1] = OwnSoftmax(24, 3)
    return vit


REFUSED = {
    "two attentions in a layer": of_timm("vit_small_patch16_18x2_224", depth=2, img_size=32),
    "two maps beside the MLP": partial(
        create_vit, SMALL_VIT | {"embed_dim": 48}, block_fn=DiffParallelScalingBlock
    ),
    "windows": of_timm("swin_tiny_patch4_window7_224", img_size=32, window_size=4),
    "talking heads": of_timm("cait_xxs24_224", depth=2, img_size=32),
    "no attention": of_timm("resnet18"),
    "a softmax of its own": partial(create_vit, SMALL, block_fn=OwnSoftmax),
    "and in a layer beside others": with_one_of_its_own,
}


@pytest.mark.parametrize("wrapped", [torch.nn.DataParallel, torch.compile])
def test_a_pair_takes_no_wrapped_model(wrapped):
    teacher, student = (create_vit(SMALL) for _ in range(2))
    for of_pair in ((wrapped(teacher), student), (teacher, wrapped(student))):
        with pytest.raises(Unwalkable, match="give model."):
            AttentionTransfer(*of_pair, Plan(how="copy"))


def test_a_layer_that_was_compiled_does_not_give_its_number_to_the_next():
    teacher, student = (randomise(create_vit(SMALL), seed) for seed in (1, 2))
    pair = AttentionTransfer(teacher, student, Plan(how="distill", layers=[0]))
    teacher.blocks[0].compile(backend="eager")
    with pytest.raises(Unwalkable, match="0 of 1 layers"):
        pair(IMAGES)


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_seen_is_refused(kind):
    model = REFUSED[kind]().eval()
    with pytest.raises(Unwalkable):
        walk(model, IMAGES)
    assert torch.nn.functional.scaled_dot_product_attention is SDPA, "the swap is over"
    assert model(IMAGES).shape == (2, 5), "and the model works"


@pytest.mark.parametrize("part", ["blocks.1", "blocks.1.attn", "blocks.1.attn.qkv", ""])
def test_hooks_run(part):
    """Those that look are called, also in Copy; those that change something count."""
    vit, teacher = randomise(create_vit(SMALL)), randomise(create_vit(SMALL), 1)
    looked, target = [], vit.get_submodule(part)
    hook = target.register_forward_hook(lambda module, inputs, output: looked.append(output))
    pair = AttentionTransfer(teacher, vit, Plan())
    looked.clear()
    expected = pair(IMAGES).logits
    assert len(looked) == 1 and looked[0].shape[0] == 2
    if part.endswith("qkv"):
        assert (looked[0][..., :48] != 0).any(), "a projection with a hook is computed whole"
    hook.remove()
    assert torch.allclose(pair(IMAGES).logits, expected, atol=1e-5)
    target.register_forward_hook(lambda module, inputs, output: output.roll(1, -1))
    changed = walk(vit, IMAGES).logits
    assert torch.equal(changed, vit(IMAGES)) and not torch.allclose(pair(IMAGES).logits, expected, atol=1e-3)


@pytest.mark.parametrize("ratio", [0, None])
def test_a_config_of_ones_own_with_a_mask_ratio(ratio):
    """Only a forward that takes noise is given it."""
    vit = create_vit(SMALL)
    vit.config = SimpleNamespace(mask_ratio=ratio)
    assert torch.equal(walk(vit, IMAGES).logits, vit(IMAGES))
    vit.config.mask_ratio = 0.75
    with pytest.raises(Unwalkable, match="mask_ratio = 0"):
        walk(vit, IMAGES)


def test_noise_reaches_what_is_wrapped():
    class Wrapper(nn.Module):
        config = SimpleNamespace(mask_ratio=0.0, image_size=32, patch_size=8)

        def forward(self, images, **options):
            return images.mean((2, 3)) + options["noise"].sum()

    assert outputs(Wrapper(), IMAGES).shape == (2, 3)


@pytest.mark.parametrize("name", ["Flatten", "AttentionPool", "ChannelAttention"])
def test_what_is_no_layer_may_stand_in_a_list_of_layers(name):
    vit = create_vit(SMALL)
    depth = len(vit.blocks)
    vit.blocks.append(type(name, (nn.Identity,), {})())
    assert len(walk(vit, IMAGES).layers) == depth
