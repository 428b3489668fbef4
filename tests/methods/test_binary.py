"""The layers of one bit against the published code (tests/golden/binary_vit.md), and against what they are
said to be: two values, whole numbers, a count of bits."""

import pytest
import torch
from safetensors.torch import load_file

from atfamily.binary import BinaryLinear, BinaryPatchConv, rounded_map, sign
from tests.helpers import ROOT, random_maps

GOLDEN = load_file(ROOT / "tests" / "golden" / "binary_vit.safetensors")


def golden(name):
    return GOLDEN[name].double()


def assert_same(actual, name):
    torch.testing.assert_close(actual, golden(name), rtol=0, atol=1e-12)


def test_sign_and_its_gradient_are_the_published_ones():
    x = golden("sign.x").requires_grad_()
    y = sign(x)
    y.backward(golden("sign.grad_out"))
    assert_same(y, "sign.y")
    assert_same(x.grad, "sign.grad")


@pytest.mark.parametrize("name", ["linear", "conv"])
def test_layers_and_their_gradients_are_the_published_ones(name):
    weight = golden(f"{name}.weight")
    if name == "linear":
        layer = BinaryLinear(weight.shape[1], weight.shape[0]).double()
    else:
        layer = BinaryPatchConv(weight.shape[1], weight.shape[0], weight.shape[2]).double()
    layer.weight.data.copy_(weight)
    x = golden(f"{name}.x").requires_grad_()
    y = layer(x)
    y.backward(golden(f"{name}.grad_out"))
    assert_same(y, f"{name}.y")
    assert_same(x.grad, f"{name}.grad")
    assert_same(layer.weight.grad, f"{name}.grad_weight")


def test_the_rounded_map_and_both_its_gradients_are_the_published_ones():
    p, share = golden("map.p").requires_grad_(), golden("map.share").requires_grad_()
    y = rounded_map(p, share)
    y.backward(golden("map.grad_out"))
    assert_same(y, "map.y")
    assert_same(p.grad, "map.grad")
    assert_same(share.grad.reshape(()), "map.grad_share")
    assert share.grad.shape == share.shape and 0 < (y == 0).double().mean() < 1


@pytest.mark.parametrize("value", [0.0, -0.1])
def test_a_share_that_training_has_driven_to_zero_is_a_map_of_zeros_and_no_nan(value):
    p, share = random_maps(1, 2, 3, 3).requires_grad_(), torch.tensor(value).double().requires_grad_()
    y = rounded_map(p, share)
    y.sum().backward()
    assert (y == 0).all() and torch.isfinite(p.grad).all() and torch.isfinite(share.grad)
