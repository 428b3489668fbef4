"""What notebook 18 writes out, a forward pass with four native components, is what timm computes, alone and
together."""

from itertools import combinations

import pytest
import torch

from atlib import create_vit
from atlib.lab.studies import COMPONENTS
from tests.book.test_taught import taught
from tests.helpers import randomise

NAME = "18-when-it-fails"
SMALL = {"img_size": 24, "patch_size": 8, "embed_dim": 36, "depth": 3, "num_heads": 3, "num_classes": 5}


@pytest.mark.parametrize(
    "names",
    [(), *combinations(COMPONENTS, 1), *combinations(COMPONENTS, 2), tuple(COMPONENTS)],
    ids=", ".join,
)
def test_vit_by_hand_is_timms(names):
    torch.manual_seed(len(names))
    arguments = {key: value for name in names for key, value in COMPONENTS[name][0].items()}
    vit = randomise(create_vit(SMALL, **arguments)).eval()  # norms, scales and biases no longer one and zero
    images = torch.randn(3, 3, 24, 24)
    with torch.no_grad():
        assert torch.allclose(taught(NAME).vit_by_hand(vit, images), vit(images), atol=1e-4)


@pytest.mark.parametrize("name", ["layer scale", "registers", "pre-norm"])
def test_each_component_changes_the_answer(name):
    """A forward pass that ignored a component could not pass: without it the same weights give something
    else."""
    torch.manual_seed(0)
    vit = randomise(create_vit(SMALL, **COMPONENTS[name][0])).eval()
    images = torch.randn(3, 3, 24, 24)
    with torch.no_grad():
        before = taught(NAME).vit_by_hand(vit, images)
        if name == "layer scale":
            vit.blocks[1].ls1.gamma.zero_()
        elif name == "registers":
            vit.reg_token.zero_()
        else:
            vit.norm_pre = torch.nn.Identity()
        after = taught(NAME).vit_by_hand(vit, images)
        assert not torch.allclose(before, after, atol=1e-3)
        assert torch.allclose(after, vit(images), atol=1e-4)


def test_an_average_pools_patches_and_nothing_else():
    """The prefix tokens' last state must not reach the logits."""
    torch.manual_seed(1)
    vit = randomise(create_vit(SMALL, global_pool="avg", reg_tokens=2)).eval()
    images = torch.randn(2, 3, 24, 24)
    with torch.no_grad():
        tokens = vit.blocks(vit.norm_pre(vit._pos_embed(vit.patch_embed(images))))
        expected = vit.head(vit.fc_norm(sum(tokens[:, i] for i in range(3, 12)) / 9))
        assert torch.allclose(taught(NAME).vit_by_hand(vit, images), expected, atol=1e-4)
