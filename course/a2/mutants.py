"""Wrong answers to A2, and the points that each is worth: {(task, variant): [(in the solution, in its place,
points), ...]}. Where the first is the name of an upload, the second makes another file of it."""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load, save

from atlib import create_vit

BLUR = 0.85  # of a matrix's own spread

STUDENT = "student.safetensors"
# What the solution's cells wrote, in half precision.
UPLOADS = {STUDENT: (Path(__file__).parent / STUDENT).read_bytes()}

# --- Task 1 ---

STUDENTS_TOKENS = ("b_t.norm1(t)", "b_t.norm1(s)", 1)
LEARNS = ("with torch.no_grad():", "if True:", 4)

# --- Task 2 ---

WHOLE = (
    "        for start in range(0, q.shape[2], block):",
    "        block = q.shape[2]\n        for start in range(0, q.shape[2], block):",
    7,  # neither the value nor the way back does without a whole map
)
SHORT = ("range(0, q.shape[2], block)", "range(0, q.shape[2] - block + 1, block)", 8)
ABOVE = ("factor = above * ctx.factor", "factor = ctx.factor", 6)

# --- Task 3 ---


def changed(change: Callable[[dict], dict]) -> Callable[[bytes], bytes]:
    """A file with different tensors."""
    return lambda content: save(change(load(content)))


def blurred(tensors: dict) -> dict:
    """A student that has learned less: there is noise on its matrices."""
    torch.manual_seed(0)
    return {
        name: value + BLUR * value.float().std() * torch.randn(value.shape) if value.ndim > 1 else value
        for name, value in sorted(tensors.items())
    }


def fresh(tensors: dict) -> dict:
    """A student that was never trained."""
    torch.manual_seed(0)
    return create_vit("glyphs", embed_dim=48).state_dict()


def other_heads(tensors: dict) -> dict:
    """The same function with its heads in a different order: the order of another student."""
    made = dict(tensors)
    for layer in range(4):
        for name in ("qkv.weight", "qkv.bias", "proj.weight"):
            key = f"blocks.{layer}.attn.{name}"
            axis = 1 if name == "proj.weight" else 0
            parts = made[key].chunk(12 if axis == 0 else 4, axis)
            turned = [parts[i - i % 4 + (i + 1) % 4] for i in range(len(parts))]
            made[key] = torch.cat(turned, axis).contiguous()
    return made


def wider(tensors: dict) -> dict:
    """A student as wide as the teacher."""
    return create_vit("glyphs").state_dict()


def with_nan(tensors: dict) -> dict:
    """A run that went wrong."""
    return tensors | {"head.bias": tensors["head.bias"] * float("nan")}


CODE = b"cos\n_exit\n(I0\ntR."  # what a pickle would run

MUTANTS = {
    ("q1", "a"): [
        STUDENTS_TOKENS,
        LEARNS,
        ("torch.where(copies, p_t, p_s)", "torch.where(copies, p_s, p_t)", 0),
        ("torch.where(copies, p_t, p_s)", "p_s", 0),  # the schedule is not looked at
        ("use[i].bool()", "use[i, :1].bool()", 2),  # the first image's schedule for all
    ],
    ("q1", "b"): [
        STUDENTS_TOKENS,
        LEARNS,
        ("use[i].bool()[:, :, None, None]", "use[i].bool().any(-1)[:, None, None, None]", 2),
        ("use[i].bool()", "use[i, :, :1].bool()", 2),  # the first head's for all
    ],
    ("q1", "c"): [
        ("p_s = (q @ k.mT * b_s.attn.scale).softmax(-1)", "p_s = (q @ k.mT).softmax(-1)", 1),
        ("(1 - a) * p_s", "(1 - a) * p_s.detach()", 4),
        ("a = share[i]", "a = share[i].round()", 2),
        ("p = a * p_t + (1 - a) * p_s", "p = (a * p_t.log() + (1 - a) * p_s.log()).softmax(-1)", 2),
    ],
    ("q2", "a"): [WHOLE, SHORT, ABOVE, ("(z_t / tau).softmax(-1)", "z_t.softmax(-1)", 0)],
    ("q2", "b"): [
        SHORT,
        ("ctx.factor = tau * scale / number", "ctx.factor = scale / number", 4),
        ("(log_t.exp() * (log_t - log_s))", "(log_t.exp() * -log_s)", 0),  # the floor is left in
        (
            "return Pull.apply(q, k, q_t, k_t, scale, scale_t, tau, block)",  # autograd keeps every block
            "total = 0\n"
            "    for s, t in zip(q.split(block, 2), q_t.detach().split(block, 2)):\n"
            "        log_s = (scale * s @ k.mT / tau).log_softmax(-1)\n"
            "        log_t = (scale_t * t @ k_t.detach().mT / tau).log_softmax(-1)\n"
            "        total = total + (log_t.exp() * (log_t - log_s)).sum()\n"
            "    return tau**2 * total / q[..., 0].numel()",
            8,
        ),
    ],
    ("q2", "c"): [
        ABOVE,
        ("ctx.factor = scale / number", "ctx.factor = 1 / number", 4),
        ("return tau * total / number", "return total / number", 0),
        ("torch.empty_like(q), torch.zeros_like(k)", "torch.zeros_like(q_t), torch.zeros_like(k_t)", 8),
    ],
    ("q3", "a"): [
        (STUDENT, changed(fresh), 0),
        (STUDENT, changed(blurred), 2),  # right often enough, with maps that are no longer close
        (STUDENT, lambda content: content[:5000], 0),
        ('STUDENT = "model solution"', 'STUDENT = "Ada"', 0),  # somebody else's file
    ],
    ("q3", "b"): [
        (STUDENT, changed(other_heads), 0),
        (STUDENT, changed(blurred), 2),
        (STUDENT, changed(wider), 0),
    ],
    ("q3", "c"): [
        (STUDENT, changed(with_nan), 0),
        (STUDENT, changed(fresh), 0),
        (STUDENT, lambda content: CODE, 0),
    ],
}
