"""The Triton kernels of `atlib.fused`, interpreted on a CPU: `test_fused.py` starts this file in a process of
its own, as TRITON_INTERPRET has to be set before Triton is imported."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode
from triton import language as tl
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle

from atlib import fused
from atlib.attention import FORBIDDEN, Seen
from atlib.fused import by_kernel
from tests.core import test_map_free
from tests.core.test_map_free import SCALES, dense, stepped
from tests.helpers import Seer, random_images

KERNELS = {"short": True, "long": False}


@pytest.fixture(autouse=True)
def products_of_bf16(monkeypatch):
    """Triton's interpreter multiplies bf16's 16 bits as integers; here as the numbers that they are."""
    plain = InterpreterBuilder.create_dot

    def as_float32(x):
        if not x.dtype.is_bf16():
            return x
        return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self, a, b, *rest):
        return plain(self, as_float32(a), as_float32(b), *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


@pytest.fixture(autouse=True, scope="module")
def languages_are_patched_once():
    """Triton's interpreter patches its language whenever a kernel starts, and again whenever that calls a
    function, which is half of the time: of each function the first call is enough."""
    plain, called = InterpretedFunction.__call__, set()

    def call(function, *arguments, **options):
        if function.fn in called:
            return function.rewrite()(*arguments, **options)
        called.add(function.fn)
        return plain(function, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpretedFunction, "__call__", call)
        yield


@pytest.fixture(params=KERNELS)
def kernel(request, monkeypatch):
    """Which of the two ways every shape goes: all keys of a head in a tile, or some at a time."""
    monkeypatch.setattr(fused, "_fits_in_registers", lambda *_: KERNELS[request.param])
    return request.param


def random_qk(B=1, H=2, N=20, d=8, d_t=12, **options):
    return test_map_free.random_qk(B, H, N, d, d_t, **{"dtype": torch.float32} | options)


def in_float64(tensors, **options):
    return stepped(dense, [x.double() for x in tensors], **options)


def assert_close(computed, expected, within=1e-5):
    test_map_free.assert_close([x.double() for x in computed], expected, within)


# A block that is full, and blocks of which the last is not; every padded width on each side.
SHAPES = [(1, 8, 12), (33, 8, 12), (64, 8, 12), (65, 1, 3), (20, 40, 24), (20, 64, 128), (20, 128, 64)]


@pytest.mark.parametrize("shape", SHAPES)
def test_every_number_of_tokens_and_every_width(kernel, shape):
    tensors = random_qk(1, 1, *shape)
    computed = stepped(by_kernel, tensors, times=3.0)
    assert computed[0].shape == () and {x.dtype for x in computed} == {torch.float32}
    assert_close(computed, in_float64(tensors, times=3.0))


def forbidding(N):
    """Masks (N, N): no token looks at itself; nobody at the first token, but the token itself."""
    to_itself, first = torch.zeros(2, N, N)
    to_itself.fill_diagonal_(FORBIDDEN)
    first[1:, 0] = FORBIDDEN
    return to_itself, first


ADDED = {
    "biases of both": ({"bias": (2, 33, 33)}, {"bias": (33, 33)}),
    "a bias of the teacher": ({}, {"bias": (2, 33, 33)}),
    "a mask": ({"mask": 0}, {}),
    "masks of both and a bias": ({"mask": 0, "bias": (33, 33)}, {"mask": 1}),
}


@pytest.mark.parametrize("name", ADDED)
def test_what_is_added_to_the_scores(kernel, name):
    """The student's mask takes its share from the teacher's map too."""

    def added(dtype):
        masks = forbidding(33)

        def tensor(key, what):
            return (masks[what] if key == "mask" else random_images(*what, seed=7)).to(dtype)

        parts = ({key: tensor(key, what) for key, what in part.items()} for part in ADDED[name])
        return dict(zip(("of_student", "of_teacher"), parts))

    images = 2 if name == "biases of both" else 1  # a head has the same in each
    tensors = random_qk(images, N=33)
    expected = in_float64(tensors, **added(torch.float64))
    assert_close(stepped(by_kernel, tensors, **added(torch.float32)), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_off_by_its_own_rounding(kernel, dtype, times=3 * 2.0**16):
    """A loss in float32, gradients in the inputs' type, where fp16's loss is scaled by more than it holds."""
    tensors = random_qk(1, 1, 70, 16, 16, dtype=dtype)
    computed, expected = stepped(by_kernel, tensors, times), in_float64(tensors)
    assert computed[0].dtype == torch.float32 and abs(computed[0] - expected[0]) <= 2e-6
    for one, other in zip(computed[1:], expected[1:], strict=True):
        assert one.dtype == dtype
        assert (one.double() / times - other).norm() <= torch.finfo(dtype).eps * other.norm()


def test_a_teacher_in_another_precision(kernel):
    q, k, q_t, k_t = random_qk()
    tensors = [q, k, q_t.half(), k_t.half()]
    assert_close(stepped(by_kernel, tensors), in_float64(tensors))
    mixed = stepped(by_kernel, [q, k.half(), q_t, k_t])
    assert mixed[1].dtype == torch.float32 and mixed[2].dtype == torch.float16


def test_sharp_scores_stay_finite_and_keep_their_digits(kernel):
    """Scores in the thousands: probabilities underflow to 0, the loss does not; where student and teacher
    agree on one key it is as small as it should be."""
    tensors = random_qk(1, 1, 40, size=30.0)
    computed, expected = stepped(by_kernel, tensors), in_float64(tensors)
    assert expected[0] > 1000 and abs(computed[0] - expected[0]) <= 1e-5 * expected[0]
    assert all(x.isfinite().all() for x in computed)
    agreed = [40 * F.normalize(x, dim=-1) for x in random_qk(1, 1, 40)]
    agreed[1:] = [agreed[0], *agreed[:1] * 2]
    computed, expected = stepped(by_kernel, agreed), in_float64(agreed)
    assert expected[0] < 1 and abs(computed[0] - expected[0]) <= 1e-4


def test_scores_far_below_zero(kernel):
    """What lies beyond the last token has the score 0, and must not outweigh them."""
    tensors, low = random_qk(1, 1, 33), torch.full((33, 33), -300.0)
    expected = in_float64(tensors)
    for of_teacher in ({}, {"bias": low}):
        found = stepped(by_kernel, tensors, of_student={"bias": low}, of_teacher=of_teacher)
        assert_close(found, expected, 1e-4)


def test_inputs_in_any_layout(kernel):
    """q and k as a joint projection gives them, (B, N, 2, H, d); an expanded head; axes in another order."""
    q, k, q_t, k_t = random_qk(2, 2, 20, 8, 8)
    expected = in_float64([q, k, q_t, k_t])
    joint = torch.stack([q, k]).permute(1, 3, 0, 2, 4).contiguous().requires_grad_()
    of_teacher = [q_t.transpose(1, 2).contiguous().transpose(1, 2), k_t.mT.contiguous().mT]
    own = joint.permute(2, 0, 3, 1, 4)
    loss = by_kernel(Seen(own[0], own[1], None, SCALES[0]), Seen(*of_teacher, None, SCALES[1]))
    loss.backward()
    assert_close([loss.detach(), *joint.grad.permute(2, 0, 3, 1, 4)], expected)
    columns = [x.mT.contiguous().mT for x in (q, k, q_t, k_t)]
    assert_close(stepped(by_kernel, columns), expected)
    expanded = [q, k, *(x[:, :1].expand(2, 2, 20, 8) for x in (q_t, k_t))]
    assert_close(stepped(by_kernel, expanded), in_float64(expanded))


@pytest.mark.parametrize("learning", [(True, False), (False, True), (False, False)])
def test_who_gets_a_gradient(kernel, learning):
    """The teacher gets none, and one of the student's two may be constant."""
    tensors = random_qk()
    own = [x.clone().requires_grad_(wanted) for x, wanted in zip(tensors, (*learning, True, True))]
    loss = by_kernel(Seen(*own[:2], None, SCALES[0]), Seen(*own[2:], None, SCALES[1]))
    assert loss.requires_grad == any(learning)
    if any(learning):
        loss.backward()
    for x, wanted, gradient in zip(own, learning, in_float64(tensors)[1:]):
        assert (x.grad is None) if not wanted else (x.grad - gradient).abs().max() <= 1e-5
    assert own[2].grad is None is own[3].grad


def test_a_value_may_be_left_out(kernel):
    skipped = stepped(by_kernel, random_qk(), value=False)
    assert skipped[0] == 0
    assert_close(skipped[1:], in_float64(random_qk())[1:])


def test_a_second_derivative_is_refused(kernel):
    tensors = [x.requires_grad_() for x in random_qk()]
    loss = by_kernel(Seen(*tensors[:2], None, SCALES[0]), Seen(*tensors[2:], None, SCALES[1]))
    with pytest.raises(RuntimeError, match="dense_attention_cross_entropy"):
        torch.autograd.grad(loss, tensors[0], create_graph=True)


def test_autocast_gives_the_type_of_attention(kernel):
    """q and k of float32, as after a norm of their own, count as attention's fused kernels see them."""
    tensors = random_qk()
    torch.set_autocast_enabled("cuda", True)  # torch.autocast("cuda") does nothing where there is none
    try:
        computed = stepped(by_kernel, tensors)
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert torch.get_autocast_dtype("cuda") == torch.float16  # PyTorch's default
    expected = stepped(by_kernel, [x.half() for x in tensors])
    assert computed[1].dtype == torch.float32
    assert all(torch.equal(one, other.float()) for one, other in zip(computed, expected))


def test_what_waits_for_the_backward_pass_is_no_map(kernel):
    """Above q and k: their gradients, or the teacher's q and k and two numbers a row."""
    q, k, q_t, k_t = random_qk(1, 2, 33, 8, 8)
    kept = {}

    def pack(x):
        kept[x.data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), Seer() as seer:
        by_kernel(
            Seen(q.requires_grad_(), k.requires_grad_(), None, SCALES[0]), Seen(q_t, k_t, None, SCALES[1])
        )
    a_row, an_input = 2 * 33 * 4, 2 * 33 * 8 * 4
    assert sum(kept.values()) == {"short": 2 * an_input, "long": 4 * an_input + 2 * a_row}[kernel]
    assert not seer.maps(33, heads=2)


def test_registered_as_pytorch_asks():
    checks = "test_schema", "test_autograd_registration"
    tensors = [x.requires_grad_(n < 2) for n, x in enumerate(random_qk(1, 1, 5, 4, 4))]
    arguments = *tensors, None, None, *SCALES
    assert opcheck(fused.map_free_short, (*arguments, True), test_utils=checks)
    assert opcheck(fused.map_free_long, arguments, test_utils=checks)


def test_flops_are_counted(kernel):
    """Four products of maps in one pass, eight in two; one of them, or two, of the teacher's width."""
    tensors = random_qk(1, 2, 20, 4, 8)
    with FlopCounterMode(display=False) as counter:
        stepped(by_kernel, tensors)
    student, teacher = (2 * 2 * 20**2 * width for width in (4, 8))
    expected = {"short": 3 * student + teacher, "long": 5 * student + 3 * teacher}
    assert counter.get_total_flops() == expected[kernel]
