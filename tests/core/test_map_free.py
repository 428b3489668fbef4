"""The map-free cross-entropy against the dense one: values, gradients, number types, memory, and everything
PyTorch runs it through."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributed, multiprocessing
from torch.nn.parallel import DistributedDataParallel

from atlib import AttentionTransfer, Plan, create_vit, forms
from atlib.attention import FORBIDDEN, Seen
from atlib.losses import dense_attention_cross_entropy
from atlib.map_free import by_blocks, by_fused_attention, map_free_cross_entropy
from tests.helpers import SMALL_VIT, Seer, forkserver, random_images, randomise, since_torch_11

HOWS = [by_blocks, by_fused_attention, map_free_cross_entropy]
PATHS = [by_blocks, by_fused_attention]
every_way = pytest.mark.parametrize("how", HOWS, ids=lambda how: how.__name__)
both_ways = pytest.mark.parametrize("how", PATHS, ids=lambda how: how.__name__)
SCALES = 0.7, 0.4


def random_qk(B=2, H=3, N=70, d=8, d_t=8, seed=0, size=1.0, dtype=torch.float64):
    """q and k of a student, then of a teacher."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (B, H, N, d), (B, H, N, d), (B, H, N, d_t), (B, H, N, d_t)
    return [
        (size * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype) for shape in shapes
    ]


def seen_of(q, k, q_t, k_t, scale=SCALES[0], scale_t=SCALES[1], mask=None, mask_t=None):
    """What a layer of the student and one of the teacher saw."""
    return Seen(q, k, None, scale, mask=mask), Seen(q_t, k_t, None, scale_t, mask=mask_t)


def dense(student, teacher, value=True):
    return dense_attention_cross_entropy([student], [teacher])


def stepped(how, tensors, scales=SCALES, times=1.0, mask=None, mask_t=None, **options):
    """The loss and the gradients of `times` the loss with respect to the student's q and k."""
    q, k = (x.detach().clone(memory_format=torch.preserve_format).requires_grad_() for x in tensors[:2])
    loss = how(*seen_of(q, k, *tensors[2:], *scales, mask, mask_t), **options)
    (times * loss).backward()
    return loss.detach(), q.grad, k.grad


def assert_close(found, expected, within):
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape and (one - other).abs().max() <= within


# --- the same number and the same gradients


@every_way
@settings(derandomize=True, deadline=None, max_examples=30)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 140)),
    widths=st.tuples(st.integers(1, 9), st.integers(1, 12)),
    scales=st.tuples(st.floats(0.05, 1.5), st.floats(0.05, 1.5)),
    times=st.sampled_from([1.0, 3.0, -0.5]),
    seed=st.integers(0, 99),
)
def test_equals_the_dense_loss(how, shape, widths, scales, times, seed):
    tensors = random_qk(*shape, *widths, seed)
    found, expected = stepped(how, tensors, scales, times), stepped(dense, tensors, scales, times)
    assert found[0].shape == () and found[0].dtype == torch.float64
    assert_close(found, expected, 1e-10)
    skipped = stepped(how, tensors, scales, times, value=False)
    assert skipped[0].item() == 0
    assert_close(skipped[1:], expected[1:], 1e-10)


@every_way
def test_inputs_in_any_layout(how):
    """q and k come from a joint projection: strided views, with gradients in their own order."""
    expected = stepped(dense, random_qk())
    q, k, q_t, k_t = random_qk()
    # (B, N, 2, H, d), as timm's linear layer gives it
    joint = torch.stack([q, k]).permute(1, 3, 0, 2, 4).contiguous().requires_grad_()
    of_teacher = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q_t, k_t)]
    own = joint.permute(2, 0, 3, 1, 4)
    assert not own[0].is_contiguous() and not of_teacher[0].is_contiguous()
    loss = how(*seen_of(own[0], own[1], *of_teacher))
    loss.backward()
    assert_close([loss.detach(), *joint.grad.permute(2, 0, 3, 1, 4)], expected, 1e-10)


@every_way
@pytest.mark.parametrize("forbidden", ["student", "teacher", "both"])
@pytest.mark.parametrize("N", [2, 17, 65])
def test_with_a_mask(how, forbidden, N):
    """Against maps written out over the tokens that are left: no biases, every row by itself."""
    own, other = torch.zeros(2, N, N, dtype=torch.float64)
    own.fill_diagonal_(FORBIDDEN)
    other[:, 0] = FORBIDDEN  # nobody looks at the first token
    other[0, 0] = 0  # but the token itself, as one that looks at nothing has no map
    mask, mask_t = {"student": (own, None), "teacher": (None, other), "both": (own, own)}[forbidden]

    def row_by_row(student, teacher):
        (q, k, _, scale, *_), (q_t, k_t, _, scale_t, *_) = student, teacher
        total = 0.0
        for i in range(N):
            left = [j for j in range(N) if mask is None or mask[i, j] == 0]
            left_t = [j for j in left if mask_t is None or mask_t[i, j] == 0]
            log_p = dict(
                zip(left, (scale * q[:, :, i : i + 1] @ k[:, :, left].mT).log_softmax(-1).unbind(-1))
            )
            p_t = (scale_t * q_t[:, :, i : i + 1] @ k_t[:, :, left_t].mT).softmax(-1).unbind(-1)
            total = total - sum((p * log_p[j]).mean() for j, p in zip(left_t, p_t))
        return total / N

    tensors = random_qk(N=N, d=5, d_t=7)
    expected = stepped(row_by_row, tensors, times=3.0)
    found = stepped(how, tensors, times=3.0, mask=mask, mask_t=mask_t)
    assert_close(found, expected, 1e-10)
    assert_close(stepped(dense, tensors, times=3.0, mask=mask, mask_t=mask_t), expected, 1e-10)
    skipped = stepped(how, tensors, times=3.0, value=False, mask=mask, mask_t=mask_t)
    assert skipped[0].item() == 0
    assert_close(skipped[1:], expected[1:], 1e-10)


@both_ways
def test_without_gradients_none_are_made(how):
    tensors = [x.requires_grad_(index < 2) for index, x in enumerate(random_qk())]
    expected = dense(*seen_of(*tensors)).item()
    with torch.no_grad(), Seer() as seer:
        loss = how(*seen_of(*tensors))
    assert not loss.requires_grad and abs(loss.item() - expected) <= 1e-10
    assert not any("baddbmm" in name for name in seer.names), (
        "the sum over queries belongs to the gradient alone"
    )


@both_ways
def test_gradients_equal_finite_differences(how):
    q, k, q_t, k_t = (x.requires_grad_(index < 2) for index, x in enumerate(random_qk(1, 2, 4, 3, 2)))
    assert torch.autograd.gradcheck(lambda a, b: how(*seen_of(a, b, q_t, k_t)), (q, k))


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
        assert one.isfinite().all()
        # One row's two largest logits may be equal up to rounding, so single entries are held against the
        # largest.
        assert (one - other).abs().max() <= 1000 * 70 * digits * other.abs().max()


def bounds(tensors, scales, dtype):
    """What rounding to `dtype` may do to value, ∂/∂q and ∂/∂k: every p, every sum of keys and every result is
    off by half an eps each.

    From the float32 maps: Σ_j p k_j is at most max|k| in size, and Σ_i p(i,j) q_i at most max|q| times the
    column's sum.
    """
    q, k, q_t, k_t = tensors
    eps, tiny = torch.finfo(dtype).eps, torch.finfo(dtype).smallest_normal
    z = scales[0] * q @ k.mT
    columns = (z.softmax(-1).sum(2) + (scales[1] * q_t @ k_t.mT).softmax(-1).sum(2)).max()
    factor = scales[0] / q[..., 0].numel()
    return (
        3 * eps * z.abs().max(),
        4 * eps * factor * k.abs().max() + eps * tiny,
        3 * eps * factor * columns * q.abs().max() + eps * tiny,
    )


@every_way
@pytest.mark.parametrize("times", [1.0, 3 * 2.0**16], ids=["plain", "scaled loss"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_off_by_its_own_rounding(how, dtype, times):
    """`times` 3 · 65536 is what a scaled fp16 loss arrives with at first; it is more than fp16 itself can
    hold."""
    rounded = random_qk(d_t=12, dtype=dtype)
    exact = [x.float() for x in rounded]
    found, expected = stepped(how, rounded, times=times), stepped(dense, exact)
    assert found[0].dtype == torch.float32 and found[1].dtype == found[2].dtype == dtype
    for one, other, bound in zip(
        (found[0], *(x.float() / times for x in found[1:])),
        expected,
        bounds(exact, SCALES, dtype),
        strict=True,
    ):
        assert (one - other).abs().max() <= bound


def test_fp16_gradients_keep_their_digits_when_the_batch_is_large():
    """A small factor, 1 / (B H N), must not push them below what fp16 can hold before the scaled loss lifts
    them again."""
    rounded = random_qk(48, 12, 65, 4, 4, dtype=torch.float16)
    expected = stepped(dense, [x.float() for x in rounded])
    for how in PATHS:
        for one, other in zip(stepped(how, rounded, times=2.0**16)[1:], expected[1:]):
            assert (one.float() / 2**16 - other).norm() <= 2e-3 * other.norm()


# --- a teacher and a student


def vit_of(seed, **changes):
    return randomise(create_vit(SMALL_VIT | {"depth": 2} | changes), seed).eval()


def pair_of(plan, teacher=None, **changes):
    return AttentionTransfer(
        vit_of(1, **(changes if teacher is None else changes | teacher)), vit_of(2, **changes), plan
    ).train()


LABELS = torch.tensor([0, 3, 1, 2])


def gradients(pair, images, call=None):
    pair.zero_grad()
    output = (pair if call is None else call)(images)
    (
        F.cross_entropy(
            output.logits.float() if output.logits.dtype == torch.bfloat16 else output.logits, LABELS
        )
        + 3 * output.transfer_loss
    ).backward()
    return {name: p.grad.clone() for name, p in pair.named_parameters() if p.grad is not None}


def largest_difference(one, other):
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


def use(monkeypatch, how):
    """Which way the loss of a pair goes."""
    monkeypatch.setattr("atlib.losses.map_free_cross_entropy", how)


@both_ways
def test_a_pair_under_autocast(monkeypatch, how):
    """Against float32: no further off than the dense loss under the same autocast, whose products are in bf16
    as well."""
    pair, images = pair_of(Plan(how="distill")), random_images(4, 3, 32, 32)
    exact, off = gradients(pair, images), {}
    for name, loss in (("dense", dense), ("map-free", how)):
        use(monkeypatch, loss)
        with torch.autocast("cpu", torch.bfloat16):
            found = gradients(pair, images)
        assert all(value.dtype == torch.float32 for value in found.values())
        off[name] = {
            key: ((found[key] - exact[key]).norm() / exact[key].norm()).item()
            for key in exact
            if "qkv" in key or "patch" in key
        }
    assert max(off["dense"].values()) > 1e-3, "bf16 must make a difference"
    for key in off["dense"]:
        assert off["map-free"][key] <= 1.5 * off["dense"][key] + 2e-3, key


@pytest.fixture
def compiler():
    yield
    torch.compiler.reset()


@since_torch_11
@both_ways
@pytest.mark.parametrize("N", [5, 70], ids=["one block", "two blocks"])
def test_compiled(compiler, how, N):
    """As one graph, forward and backward. (`aot_eager` traces both as the default compiler does, but makes no
    machine code, which takes minutes.)"""
    tensors = random_qk(N=N, d_t=6)
    compiled = torch.compile(how, fullgraph=True, backend="aot_eager")
    assert_close(stepped(compiled, tensors, times=3.0), stepped(dense, tensors, times=3.0), 1e-10)


# --- several processes


PLANS = [Plan(how="distill"), Plan(how="copy"), Plan(what="q", how="distill", layers=[0])]


def half_a_batch(rank, folder):
    """One of two processes: half of the images each, gradients averaged by DDP."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=2)
    assert distributed.get_world_size() == 2
    images = random_images(4, 3, 32, 32, dtype=torch.float64)[2 * rank : 2 * rank + 2]
    for index, plan in enumerate(PLANS):
        pair = pair_of(plan).double()
        wrapped = DistributedDataParallel(pair)
        for _ in range(2):  # DDP notices only in the second step that a parameter was left out in the first
            wrapped.zero_grad()
            output = wrapped(images)
            (
                F.cross_entropy(output.logits, LABELS[2 * rank : 2 * rank + 2]) + 3 * output.transfer_loss
            ).backward()
        torch.save({name: p.grad for name, p in pair.named_parameters()}, folder / f"{index}-{rank}.pt")
    distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes_have_the_gradients_of_one_with_the_whole_batch(tmp_path):
    forkserver()  # it imports torch, and the two are forked from it
    multiprocessing.start_processes(half_a_batch, (tmp_path,), nprocs=2, start_method="forkserver")
    for index, plan in enumerate(PLANS):
        expected = gradients(pair_of(plan).double(), random_images(4, 3, 32, 32, dtype=torch.float64))
        for rank in (0, 1):
            assert largest_difference(torch.load(tmp_path / f"{index}-{rank}.pt"), expected) <= 1e-10


# --- no map is ever stored


N_TOKENS = 197


@both_ways
@pytest.mark.parametrize(
    "widths", [(8, 8), (8, 12), (12, 8)], ids=["same width", "wider teacher", "wider student"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_map_is_stored_by_the_loss(how, widths, dtype):
    tensors = random_qk(2, 3, N_TOKENS, *widths, dtype=dtype)
    with Seer() as seer:
        stepped(how, tensors)
    assert not seer.maps(N_TOKENS, heads=6) and len(seer.names) > 10
    with Seer() as seer:
        stepped(dense, tensors)
    assert seer.maps(N_TOKENS, heads=6), "the dense loss stores maps, and it is seen"


WITHOUT_MAPS = {
    "distill": (Plan(how="distill"), {}),
    "distill, wider teacher": (Plan(how="distill"), {"embed_dim": 36}),
    "distill some heads": (Plan(how="distill", heads=[0, 2], layers=[0]), {}),
    "distill merged heads": (Plan(how="distill", unequal_heads="aggregate"), {"num_heads": 2}),
    "distill, registers dropped": (Plan(how="distill", unequal_prefix="drop"), {"reg_tokens": 2}),
    "distill q": (Plan(what="q", how="distill"), {}),
    "copy": (Plan(), {}),
    "copy, wider teacher": (Plan(), {"embed_dim": 36}),
    "copy, narrower teacher": (Plan(), {"embed_dim": 12}),
    "copy some heads": (Plan(heads=[1]), {}),
    "copy merged heads": (Plan(unequal_heads="aggregate"), {"num_heads": 2}),
    "copy k": (Plan(what="k"), {}),
}


@pytest.mark.parametrize("name", WITHOUT_MAPS)
@pytest.mark.parametrize("how", PATHS, ids=lambda how: how.__name__)
def test_no_map_is_stored_by_a_whole_step(monkeypatch, name, how):
    """Teacher, student, loss, backward pass and AdamW, with 196 patches and a class token."""
    plan, teacher = WITHOUT_MAPS[name]
    use(monkeypatch, how)
    pair = pair_of(plan, teacher, img_size=56, patch_size=4)
    assert pair.path == "map-free"
    images, optimizer = random_images(4, 3, 56, 56), torch.optim.AdamW(pair.parameters())
    with Seer() as seer:
        gradients(pair, images)
        optimizer.step()
    assert not seer.maps(N_TOKENS, heads=12)
    assert any(shape[-2:] == (N_TOKENS, 8) for shape in seer.shapes), "q and k of that many tokens are seen"


def test_a_dense_step_is_seen(monkeypatch):
    pair = pair_of(Plan(how="distill"), img_size=56, patch_size=4)
    monkeypatch.setattr(forms, "attention_cross_entropy", dense_attention_cross_entropy)
    with Seer() as seer:
        gradients(pair, random_images(4, 3, 56, 56))
    assert (4, 3, N_TOKENS, N_TOKENS) in seer.shapes


def test_what_waits_for_the_backward_pass_grows_with_the_tokens_only():
    """Two tensors as large as q: four times the tokens, four times the memory."""

    def kept(how, N):
        sizes = {}
        tensors = random_qk(1, 2, N, 8, 8, dtype=torch.float32)

        def pack(x):
            sizes[x.data_ptr()] = max(sizes.get(x.data_ptr(), 0), x.untyped_storage().nbytes())
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            how(*seen_of(*(x.requires_grad_() for x in tensors[:2]), *tensors[2:]))
        return sum(sizes.values())

    for how in PATHS:
        assert kept(how, 788) <= 4.5 * kept(how, 197)
    assert kept(by_blocks, 197) == 2 * 2 * 197 * 8 * 4
    assert kept(dense, 788) > 10 * kept(dense, 197)
