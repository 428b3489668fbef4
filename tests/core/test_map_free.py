"""The map-free cross-entropy against the dense one: values, gradients, types, memory."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atlib import AttentionTransfer, Plan, create_vit, map_free
from atlib.attention import FORBIDDEN, Seen
from atlib.losses import dense_attention_cross_entropy
from atlib.map_free import by_blocks, by_fused_attention
from tests.helpers import SMALL_VIT, Seer, random_images, randomise

both_ways = pytest.mark.parametrize("how", [by_blocks, by_fused_attention], ids=lambda how: how.__name__)
SCALES = 0.7, 0.4


@pytest.fixture(autouse=True, scope="module")
def small_blocks():
    """Several blocks of queries also where tokens are few."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(map_free, "BLOCK", 8)
        yield


def random_qk(B=2, H=3, N=70, d=8, d_t=8, seed=0, size=1.0, dtype=torch.float64):
    """q and k of a student, then of a teacher."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (B, H, N, d), (B, H, N, d), (B, H, N, d_t), (B, H, N, d_t)
    return [(size * torch.randn(s, generator=generator, dtype=torch.float64)).to(dtype) for s in shapes]


def seen_of(q, k, q_t, k_t, scales=SCALES, of_student=None, of_teacher=None):
    """What a layer of the student and one of the teacher saw; each may have a bias or a mask."""
    student = Seen(q, k, None, scales[0], **(of_student or {}))
    return student, Seen(q_t, k_t, None, scales[1], **(of_teacher or {}))


def dense(student, teacher, value=True):
    return dense_attention_cross_entropy([student], [teacher])


def stepped(how, tensors, times=1.0, value=True, **seen):
    """The loss and the gradients of `times` the loss with respect to the student's q and k."""
    q, k = (x.detach().clone().requires_grad_() for x in tensors[:2])
    loss = how(*seen_of(q, k, *tensors[2:], **seen), value)
    (times * loss).backward()
    return loss.detach(), q.grad, k.grad


def assert_close(found, expected, within):
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape and (one - other).abs().max() <= within


# --- the same number and the same gradients


@both_ways
@settings(derandomize=True, deadline=None, max_examples=20)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 40)),
    widths=st.tuples(st.integers(1, 9), st.integers(1, 12)),
    scales=st.tuples(st.floats(0.05, 1.5), st.floats(0.05, 1.5)),
    times=st.sampled_from([1.0, 3.0, -0.5]),
    seed=st.integers(0, 99),
    biased=st.tuples(*[st.sampled_from([None, "a head", "all heads"])] * 2),
)
def test_equals_the_dense_loss(how, shape, widths, scales, times, seed, biased):
    tensors, (_, H, N) = random_qk(*shape, *widths, seed), shape
    shapes = {None: (0,), "a head": (H, N, N), "all heads": (N, N)}
    biases = [kind and random_images(*shapes[kind], seed=seed, dtype=torch.float64) for kind in biased]
    seen = {"times": times, "scales": scales}
    seen |= {side: {"bias": bias} for side, bias in zip(("of_student", "of_teacher"), biases)}
    found, expected = stepped(how, tensors, **seen), stepped(dense, tensors, **seen)
    assert found[0].shape == () and found[0].dtype == torch.float64
    assert_close(found, expected, 1e-10)
    skipped = stepped(how, tensors, value=False, **seen)
    assert skipped[0].item() == 0
    assert_close(skipped[1:], expected[1:], 1e-10)


@pytest.mark.parametrize("shape", [(17, 17), (3, 17, 17), (2, 1, 17, 17), (2, 3, 17, 17)])
def test_a_learned_bias_gets_the_gradient_of_the_dense_loss(shape):
    """Of all images and heads that share it; one for each image where a mask of padding is added to it."""
    tensors, bias, gradients = random_qk(N=17), random_images(*shape, dtype=torch.float64), []
    for loss in (by_blocks, dense):
        learned = bias.clone().requires_grad_()
        loss(*seen_of(*tensors, of_student={"bias": learned})).backward()
        gradients.append(learned.grad)
    assert_close(gradients[:1], gradients[1:], 1e-12)


@both_ways
@pytest.mark.parametrize("forbidden", ["student", "teacher", "both"])
def test_with_a_mask(how, forbidden, N=17):
    """Against maps written out over the tokens that are left: no biases, every row by itself."""
    own, other = torch.zeros(2, N, N, dtype=torch.float64)
    own.fill_diagonal_(FORBIDDEN)
    other[:, 0] = FORBIDDEN  # nobody looks at the first token
    other[0, 0] = 0  # but the token itself, as one that looks at nothing has no map
    mask, mask_t = {"student": (own, None), "teacher": (None, other), "both": (own, own)}[forbidden]

    def row_by_row(student, teacher, value):
        (q, k, _, scale, *_), (q_t, k_t, _, scale_t, *_) = student, teacher
        total = 0.0
        for i in range(N):
            left = [j for j in range(N) if mask is None or mask[i, j] == 0]
            left_t = [j for j in left if mask_t is None or mask_t[i, j] == 0]
            log_p = dict(zip(left, (scale * q[:, :, [i]] @ k[:, :, left].mT).log_softmax(-1).unbind(-1)))
            p_t = (scale_t * q_t[:, :, i : i + 1] @ k_t[:, :, left_t].mT).softmax(-1).unbind(-1)
            total = total - sum((p * log_p[j]).mean() for j, p in zip(left_t, p_t))
        return total / N

    tensors = random_qk(N=N, d=5, d_t=7)
    expected = stepped(row_by_row, tensors)
    for way in (how, dense):
        found = stepped(way, tensors, of_student={"mask": mask}, of_teacher={"mask": mask_t})
        assert_close(found, expected, 1e-10)


@both_ways
def test_a_second_derivative_is_refused(how):
    """It would be wrong: the gradient is made with maps that are constants by then."""
    tensors = [x.requires_grad_(index < 2) for index, x in enumerate(random_qk(1, 1, 4, 3, 3))]
    for x in tensors[:2]:
        with pytest.raises(RuntimeError, match="dense_attention_cross_entropy"):
            torch.autograd.grad(how(*seen_of(*tensors)), x, create_graph=True)
    torch.autograd.grad(dense(*seen_of(*tensors)), tensors[0], create_graph=True)


# --- number types


@both_ways
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_sharp_logits_stay_finite(how, dtype):
    """Attention logits in the thousands: probabilities underflow to 0, the loss does not."""
    tensors = random_qk(size=100.0, dtype=dtype)
    found, expected = stepped(how, tensors), stepped(dense, [x.double() for x in tensors])
    digits = torch.finfo(dtype).eps
    assert expected[0] > 1000 and abs(found[0] - expected[0]) <= 200 * digits * expected[0]
    for one, other in zip(found[1:], expected[1:]):
        # A row's two largest logits may be equal up to rounding: single entries are held against the largest.
        assert (one - other).abs().max() <= 1000 * 70 * digits * other.abs().max()


@both_ways
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_keeps_its_digits(how, dtype):
    """1 / (B H N) would push gradients below what fp16 holds; the loss is scaled by more than that."""
    times, within = 3 * 2.0**16, 2 * torch.finfo(dtype).eps
    rounded = random_qk(48, 12, 65, 4, 4, dtype=dtype)
    found, expected = stepped(how, rounded, times=times), stepped(dense, [x.float() for x in rounded])
    assert found[0].dtype == torch.float32 and abs(found[0] - expected[0]) <= within * expected[0]
    for one, other in zip(found[1:], expected[1:]):
        assert one.dtype == dtype
        assert (one.float() / times - other).norm() <= within * other.norm()


def test_under_autocast_blocks_stay_in_float32():
    tensors = random_qk(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = stepped(by_blocks, tensors)
    assert_close(found, stepped(by_blocks, tensors), 0)


# --- no map is ever stored


N_TOKENS = 197


@both_ways
@pytest.mark.parametrize("widths", [(8, 12), (12, 8)], ids=["wider teacher", "wider student"])
def test_no_map_is_stored_by_the_loss(how, widths):
    tensors = random_qk(2, 3, N_TOKENS, *widths, dtype=torch.float32)
    with Seer() as seer:
        stepped(how, tensors)
    assert not seer.maps(N_TOKENS, heads=6) and len(seer.names) > 10
    with Seer() as seer:
        stepped(dense, tensors)
    assert seer.maps(N_TOKENS, heads=6), "the dense loss stores maps, and it is seen"


WITHOUT_MAPS = {
    "distill, wider teacher": (Plan(how="distill"), {"embed_dim": 36}),
    "distill some heads": (Plan(how="distill", heads=[0, 2], layers=[0]), {}),
    "distill merged heads": (Plan(how="distill", unequal_heads="aggregate"), {"num_heads": 2}),
    "distill, registers dropped": (Plan(how="distill", unequal_prefix="drop"), {"reg_tokens": 2}),
    "copy, narrower teacher": (Plan(), {"embed_dim": 12}),
    "copy some heads": (Plan(heads=[1]), {}),
    "copy merged heads": (Plan(unequal_heads="aggregate"), {"num_heads": 2}),
}


@pytest.mark.parametrize("name", WITHOUT_MAPS)
def test_no_map_is_stored_by_a_whole_step(name):
    """Teacher, student, loss and backward pass, with 196 patches and a class token."""
    plan, of_teacher = WITHOUT_MAPS[name]
    sizes = SMALL_VIT | {"depth": 2, "img_size": 56, "patch_size": 4}
    vits = (randomise(create_vit(sizes | more), seed) for seed, more in ((1, of_teacher), (2, {})))
    pair = AttentionTransfer(*vits, plan).train()
    with Seer() as seer:
        output = pair(random_images(4, 3, 56, 56))
        (output.logits.square().mean() + 3 * output.transfer_loss).backward()
    assert pair.path == "map-free" and not seer.maps(N_TOKENS, heads=12)
    assert any(shape[-2:] == (N_TOKENS, 8) for shape in seer.shapes), "q and k of that many tokens are seen"


@both_ways
def test_what_waits_for_the_backward_pass_grows_with_the_tokens_only(how):
    """Four times the tokens, four times the memory."""

    def kept(how, N):
        sizes = {}
        tensors = random_qk(1, 2, N, 8, 8, dtype=torch.float32)

        def pack(x):
            sizes[x.data_ptr()] = max(sizes.get(x.data_ptr(), 0), x.untyped_storage().nbytes())
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            how(*seen_of(*(x.requires_grad_() for x in tensors[:2]), *tensors[2:]))
        return sum(sizes.values())

    assert kept(how, 788) <= 4.5 * kept(how, 197) and kept(dense, 788) > 10 * kept(dense, 197)
