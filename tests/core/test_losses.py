"""Losses against loops over floats; that of maps is in `test_map_free.py` and `test_modes.py`."""

import math

import pytest
import torch

from atlib.attention import Seen
from atlib.baselines import feature_mse, hard_distillation, soft_distillation
from atlib.losses import attention_cross_entropy, dense_attention_cross_entropy, projection_mse
from tests.helpers import random_images

SCALE = 0.6


def layer(*shape, seed=0):
    """What an attention layer saw, in float64, with gradients: random q, k, v of shape (B, H, N, d)."""
    q, k, v = 1.5 * random_images(3, *shape, seed=seed, dtype=torch.float64)
    return Seen(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), SCALE)


def test_losses_of_layers_add_up():
    students, teachers = (
        [layer(2, 3, 4, d, seed=seed + i) for i in range(3)] for d, seed in ((2, 1), (5, 7))
    )
    expected = sum(-(t.map * s.map.log()).sum(-1).mean().item() for s, t in zip(students, teachers))
    for loss in (attention_cross_entropy, dense_attention_cross_entropy):
        assert loss(students, teachers).item() == pytest.approx(expected, rel=1e-12)


def test_a_teacher_that_was_given_a_map():
    student, p = layer(1, 2, 4, 3), torch.rand(1, 2, 4, 4, dtype=torch.float64).softmax(-1)
    expected = -(p * student.map.log()).sum(-1).mean().item()
    teacher = [Seen(None, None, student.v, SCALE, p)]
    assert dense_attention_cross_entropy([student], teacher).item() == pytest.approx(expected, rel=1e-12)
    with pytest.raises(ValueError):
        attention_cross_entropy([student], teacher)


# --- squared errors


def mean_square(one, other):
    """Mean over all entries, with nothing but floats."""
    pairs = zip(one.flatten().tolist(), other.flatten().tolist(), strict=True)
    return sum((x - y) ** 2 for x, y in pairs) / one.numel()


def test_squared_errors_of_projections_and_features():
    """Mean over all elements, summed over layers, and no gradient to the teacher."""
    students, teachers = ([layer(2, 3, 4, 5, seed=seed + i) for i in range(2)] for seed in (1, 7))
    for what in "qkv":
        streams = [[getattr(seen, what) for seen in layers] for layers in (students, teachers)]
        expected = sum(map(mean_square, *streams))
        found = projection_mse(students, teachers, what)
        features = feature_mse(*([x.flatten(0, 1) for x in some] for some in streams))
        assert found.item() == pytest.approx(expected, rel=1e-12) == features.item()
        gradients = torch.autograd.grad(found, [*streams[0], *streams[1]], allow_unused=True)
        for gradient, one, other in zip(gradients, *streams):
            torch.testing.assert_close(gradient, 2 * (one - other).detach() / 120, rtol=1e-12, atol=0)
        assert gradients[2:] == (None, None)


# --- class predictions


def test_distilled_predictions():
    own, target = 3 * random_images(2, 3, 4, dtype=torch.float64)

    def softened(row, temperature):
        powers = [math.exp(x / temperature) for x in row]
        return [x / sum(powers) for x in powers]

    soft = hard = 0.0
    for row, other in zip(own.tolist(), target.tolist()):
        p_s, p_t = softened(row, 2.5), softened(other, 2.5)
        soft += 2.5**2 * sum(t * math.log(t / s) for s, t in zip(p_s, p_t)) / 3
        hard -= math.log(softened(row, 1)[other.index(max(other))]) / 3
    assert soft_distillation(own, target, 2.5).item() == pytest.approx(soft, rel=1e-9)
    assert hard_distillation(own, target).item() == pytest.approx(hard, rel=1e-9)
