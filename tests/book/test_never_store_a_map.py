"""What *Never store a map* writes out, the map-free losses, is what atlib computes, on other inputs than the
notebook's."""

import pytest
import torch

from atlib.attention import Seen
from atlib.losses import dense_attention_cross_entropy
from atlib.map_free import by_blocks, by_fused_attention
from tests.book.test_taught import taught

SHAPES = [(1, 1, 1, 3), (2, 3, 17, 5), (1, 2, 65, 8), (2, 1, 197, 4)]


def inputs(B, H, N, d):
    torch.manual_seed(N)
    tensors = [2 * torch.randn(B, H, N, d, dtype=torch.float64) for _ in range(4)]
    return [x.requires_grad_(index < 2) for index, x in enumerate(tensors)]


def layers(q, k, q_t, k_t, scale):
    return Seen(q, k, None, scale), Seen(q_t, k_t, None, scale)


def definition(*inputs):
    student, teacher = layers(*inputs)
    return dense_attention_cross_entropy([student], [teacher])


def gradients(loss, q, k):
    return torch.autograd.grad(loss, (q, k))


def close(tensors, expected):
    pairs = zip(tensors, expected, strict=True)
    return all(torch.allclose(one, other, rtol=0, atol=1e-12) for one, other in pairs)


@pytest.mark.parametrize("shape", SHAPES)
def test_dense_loss_is_the_definition(shape):
    q, k, q_t, k_t = inputs(*shape)
    ours = taught("never-store-a-map").dense_loss(q, k, q_t, k_t, 0.7)
    theirs = definition(q, k, q_t, k_t, 0.7)
    assert close([ours, *gradients(ours, q, k)], [theirs, *gradients(theirs, q, k)])


@pytest.mark.parametrize("shape", SHAPES)
def test_surrogate_has_the_gradients_of_atlibs_fused_loss(shape):
    q, k, q_t, k_t = inputs(*shape)
    by_surrogate = gradients(taught("never-store-a-map").surrogate(q, k, q_t, k_t, 0.7), q, k)
    for theirs in (by_fused_attention(*layers(q, k, q_t, k_t, 0.7)), definition(q, k, q_t, k_t, 0.7)):
        assert close(by_surrogate, gradients(theirs, q, k))


@pytest.mark.parametrize("block", [1, 7, 64])
@pytest.mark.parametrize("shape", SHAPES)
def test_blockwise_is_atlibs_loss_by_blocks(shape, block):
    q, k, q_t, k_t = inputs(*shape)
    with torch.no_grad():
        by_hand = taught("never-store-a-map").blockwise(q, k, q_t, k_t, 0.7, block)
    for theirs in (by_blocks(*layers(q, k, q_t, k_t, 0.7)), definition(q, k, q_t, k_t, 0.7)):
        assert close(by_hand, [theirs.detach(), *gradients(theirs, q, k)])
