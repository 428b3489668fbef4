"""Every loss against loops over floats; of the attention cross-entropy also its gradient, and what it is at
its minimum."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atlib.attention import Seen
from atlib.baselines import feature_mse, hard_distillation, soft_distillation
from atlib.losses import attention_cross_entropy, dense_attention_cross_entropy, note, noted, projection_mse

SCALE = 0.6


def layer(*shape, seed=0, size=1.5):
    """What an attention layer saw, in float64, with gradients: random q, k, v of shape (B, H, N, d)."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (size * torch.randn(*shape, generator=generator, dtype=torch.float64) for _ in range(3))
    return Seen(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), SCALE)


def row(seen, b, h, i):
    """One row of a map with nothing but floats: softmax over keys of scale times the dot product."""
    q, k = seen.q.tolist()[b][h][i], seen.k.tolist()[b][h]
    powers = [math.exp(seen.scale * sum(x * y for x, y in zip(q, key))) for key in k]
    return [power / sum(powers) for power in powers]


def three_loops(student, teacher):
    total = 0.0
    for own, target in zip(student, teacher):
        B, H, N, _ = own.q.shape
        rows = [
            -sum(p_t * math.log(p_s) for p_s, p_t in zip(row(own, b, h, i), row(target, b, h, i)))
            for b in range(B)
            for h in range(H)
            for i in range(N)
        ]
        total += sum(rows) / (B * H * N)
    return total


def entropy(layers):
    return sum(-(seen.map * seen.map.log()).sum(-1).mean().item() for seen in layers)


@settings(derandomize=True, deadline=None, max_examples=20)
@given(
    shape=st.tuples(*[st.integers(1, 3)] * 2, st.integers(1, 5), st.integers(1, 4)),
    depth=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_equals_three_loops(shape, depth, seed):
    student = [layer(*shape, seed=seed + i) for i in range(depth)]
    teacher = [layer(*shape, seed=seed + 50 + i) for i in range(depth)]
    for loss in (attention_cross_entropy, dense_attention_cross_entropy):
        found = loss(student, teacher)
        assert found.shape == () and found.dtype == torch.float64
        assert found.item() == pytest.approx(three_loops(student, teacher), rel=1e-12)


def test_teacher_and_student_of_different_head_width():
    student, teacher = layer(2, 3, 5, 2, seed=1), layer(2, 3, 5, 7, seed=2)
    assert attention_cross_entropy([student], [teacher]).item() == pytest.approx(
        three_loops([student], [teacher]), rel=1e-12
    )


def test_gradient_is_the_difference_of_the_maps():
    """d loss / d scores = (p_s - p_t) / (B H N), written out through scores = scale q kᵀ."""
    student, teacher = layer(2, 3, 5, 4, seed=1), layer(2, 3, 5, 4, seed=2)
    attention_cross_entropy([student], [teacher]).backward()
    difference = (student.map - teacher.map).detach() / (2 * 3 * 5)
    expected_q = SCALE * torch.einsum("bhij,bhjd->bhid", difference, student.k)
    expected_k = SCALE * torch.einsum("bhij,bhid->bhjd", difference, student.q)
    torch.testing.assert_close(student.q.grad, expected_q, rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(student.k.grad, expected_k, rtol=1e-10, atol=1e-14)


def test_a_teacher_that_was_given_a_map():
    student, p = layer(1, 2, 4, 3), torch.rand(1, 2, 4, 4, dtype=torch.float64).softmax(-1)
    expected = -(p * student.map.log()).sum(-1).mean().item()
    teacher = [Seen(None, None, student.v, SCALE, p)]
    assert dense_attention_cross_entropy([student], teacher).item() == pytest.approx(expected, rel=1e-12)
    with pytest.raises(ValueError):
        attention_cross_entropy([student], teacher)


def test_sharp_maps_stay_finite():
    """log softmax, not the log of a softmax: a probability of 1e-400 is 0 and its log would be -inf."""
    q = torch.zeros(1, 1, 2, 1, dtype=torch.float64)
    q[..., 0] = 1.0
    k = torch.tensor([0.0, 1000.0], dtype=torch.float64).reshape(1, 1, 2, 1)
    student = Seen(q.requires_grad_(), k, q, 1.0)
    found = attention_cross_entropy([student], [Seen(q, -k, q, 1.0)])
    assert found.item() == pytest.approx(1000.0)
    found.backward()
    assert student.q.grad.isfinite().all()


# --- squared errors


def mean_square(one, other):
    """Mean over all entries of nested lists."""
    one, other = (torch.as_tensor(x).flatten().tolist() for x in (one, other))
    return sum((x - y) ** 2 for x, y in zip(one, other, strict=True)) / len(one)


@pytest.mark.parametrize("what", ["q", "k", "v"])
def test_squared_error_of_projections(what):
    """Mean over all elements, summed over layers, and no gradient to the teacher."""
    students, teachers = ([layer(2, 3, 4, 5, seed=seed + i) for i in range(2)] for seed in (1, 7))
    found = projection_mse(students, teachers, what)
    assert found.item() == pytest.approx(
        sum(mean_square(getattr(s, what), getattr(t, what)) for s, t in zip(students, teachers)), rel=1e-12
    )
    found.backward()
    for own, target in zip(students, teachers):
        expected = 2 * (getattr(own, what) - getattr(target, what)).detach() / 120
        torch.testing.assert_close(getattr(own, what).grad, expected, rtol=1e-12, atol=0)
        assert getattr(target, what).grad is None and all(
            getattr(own, other).grad is None for other in "qkv" if other != what
        )


def test_squared_error_of_features():
    students, teachers = (
        [torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True) for _ in range(3)] for _ in range(2)
    )
    found = feature_mse(students, teachers)
    assert found.item() == pytest.approx(sum(map(mean_square, students, teachers)), rel=1e-12)
    found.backward()
    assert all(x.grad.any() for x in students) and all(x.grad is None for x in teachers)


# --- class predictions


@settings(derandomize=True, deadline=None, max_examples=30)
@given(
    batch=st.integers(1, 4),
    classes=st.integers(2, 5),
    temperature=st.floats(0.3, 10),
    seed=st.integers(0, 99),
)
def test_distilled_predictions(batch, classes, temperature, seed):
    generator = torch.Generator().manual_seed(seed)
    own, target = (
        3 * torch.randn(batch, classes, generator=generator, dtype=torch.float64) for _ in range(2)
    )

    def softened(row, temperature):
        powers = [math.exp(x / temperature) for x in row]
        return [x / sum(powers) for x in powers]

    soft = hard = 0.0
    for row, other in zip(own.tolist(), target.tolist()):
        p_s, p_t = softened(row, temperature), softened(other, temperature)
        soft += temperature**2 * sum(t * math.log(t / s) for s, t in zip(p_s, p_t)) / batch
        hard -= math.log(softened(row, 1)[other.index(max(other))]) / batch
    assert soft_distillation(own, target, temperature).item() == pytest.approx(soft, rel=1e-9, abs=1e-12)
    assert hard_distillation(own, target).item() == pytest.approx(hard, rel=1e-9, abs=1e-12)
    assert abs(soft_distillation(own, own, temperature).item()) <= 1e-12


def test_what_is_noted_twice_is_added():
    with noted() as notes:
        values = [note("part", torch.tensor(x, requires_grad=True)) for x in (2.0, 3.5)]
    assert {name: value.item() for name, value in notes.items()} == {"part": 5.5}
    assert all(value.requires_grad for value in values) and not notes["part"].requires_grad
    assert note("part", values[0]) is values[0] and notes["part"].item() == 5.5
