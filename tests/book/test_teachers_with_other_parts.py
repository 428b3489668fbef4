"""What page D6 writes out, a forward pass with four native components, is what timm computes, alone and
together."""

import pytest
import torch

from atlib import create_vit
from tests.book.test_taught import taught
from tests.helpers import randomise

NAME = "teachers-with-other-parts"
SMALL = {"img_size": 24, "patch_size": 8, "embed_dim": 36, "depth": 3, "num_heads": 3, "num_classes": 5}
REGISTERS, AVERAGE = {"reg_tokens": 4}, {"global_pool": "avg"}
LAYER_SCALE, NORM_BEFORE = {"init_values": 0.1}, {"pre_norm": True}
ALL = REGISTERS | AVERAGE | LAYER_SCALE | NORM_BEFORE


@pytest.mark.parametrize("arguments", [{}, REGISTERS, AVERAGE, LAYER_SCALE, NORM_BEFORE, ALL], ids=", ".join)
def test_vit_by_hand_is_timms(arguments):
    torch.manual_seed(len(arguments))
    vit = randomise(create_vit(SMALL, **arguments)).eval()  # norms and biases no longer one and zero
    images = torch.randn(3, 3, 24, 24)
    with torch.no_grad():
        assert torch.allclose(taught(NAME).vit_by_hand(vit, images), vit(images), atol=1e-4)


def test_registers_change_the_answer():
    """A forward pass that ignored them could not pass: without them the same weights give something else."""
    torch.manual_seed(0)
    vit = randomise(create_vit(SMALL, **REGISTERS)).eval()
    images = torch.randn(3, 3, 24, 24)
    with torch.no_grad():
        before = taught(NAME).vit_by_hand(vit, images)
        vit.reg_token.zero_()
        after = taught(NAME).vit_by_hand(vit, images)
        assert not torch.allclose(before, after, atol=1e-3)
        assert torch.allclose(after, vit(images), atol=1e-4)
