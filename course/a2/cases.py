"""What the hidden tests of A2 ask; `course/a2/master.md` gives each its points."""

import math
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import hidden
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from atbook.exercises.inputs import vit
from atbook.exercises.own import own_seed
from atbook.worlds import glyph_images
from atbook.worlds.glyphs import World, generate
from atlib import create_vit, walk
from atlib.checkpoint import load_vit, read_tensors
from atlib.walking import Instead

# --- Task 1: copy by a schedule ---


def copied(teacher, student, images: Tensor, schedule: Tensor) -> Tensor:
    """The logits of this edition's variant: a walk for each layer, and one that puts all maps in."""
    with torch.no_grad():
        of_teacher = [seen.map for seen in walk(teacher, images).layers]
    replace = {}
    for i, line in enumerate(schedule.to(images)):
        of_student = walk(student, images, replace=replace, stop_after=i).layers[i].map
        share = line.reshape(*line.shape, *(1,) * (4 - line.ndim))
        replace[i] = Instead(map=of_student + share * (of_teacher[i] - of_student))
    return walk(student, images, replace=replace).logits


def copy_inputs(env: dict, task: str, **wider) -> tuple:
    """Two ViTs of three layers, four images, and the shape of this edition's schedule."""
    seed = hidden.seed(env, task)
    shape = {"a": (3, 4), "b": (3, 4, 3), "c": (3, 4)}[hidden.variant("q1")]
    drawn = hidden.normal(seed + 3, *shape)
    schedule = drawn.sigmoid() if hidden.variant("q1") == "c" else (drawn > 0).double()
    return vit(seed, **wider), vit(seed + 1), hidden.normal(seed + 2, 4, 3, 16, 16), schedule


def logits_of(scheduled, teacher, student, images: Tensor, schedule: Tensor) -> Tensor:
    """The logits of an answer, which gets copies of what it could change."""
    return scheduled(teacher, student, images.clone(), schedule.clone())


def copy_values(scheduled, env: dict) -> None:
    """The logits are right with a teacher whose heads are wider."""
    inputs = copy_inputs(env, "A2.1", embed_dim=24)
    with torch.no_grad():
        want = copied(*inputs)
    hidden.same(logits_of(scheduled, *inputs).detach(), want, "logits")


def copy_gradients(scheduled, env: dict) -> None:
    """The gradients of all parameters of the student are right, and the teacher gets none."""
    inputs = copy_inputs(env, "A2.1 gradients")
    teacher, student = inputs[:2]
    weights = hidden.normal(hidden.seed(env, "A2.1 weights"), 4, 5)
    (copied(*inputs) * weights).sum().backward()
    want = {name: p.grad for name, p in student.named_parameters()}
    for model in (teacher, student):
        model.zero_grad(set_to_none=True)
    logits = logits_of(scheduled, *inputs)
    if type(logits) is not Tensor or not logits.requires_grad:
        raise AssertionError("no gradient reaches the student: the logits hang on none of its parameters")
    (logits * weights).sum().backward()
    for name, p in student.named_parameters():
        none = torch.zeros_like(p)
        expected = none if want[name] is None else want[name]
        hidden.same(none if p.grad is None else p.grad, expected, f"gradient of the student's {name}")
    if any(p.grad is not None and float(p.grad.abs().max()) > 0 for p in teacher.parameters()):
        raise AssertionError("the teacher gets a gradient")


def copy_all(scheduled, env: dict) -> None:
    """Every map is the teacher's, and the teacher looks at its own tokens."""
    *models, images, schedule = copy_inputs(env, "A2.1 all")
    inputs = *models, images, torch.ones_like(schedule)
    with torch.no_grad():
        want = copied(*inputs)
    hidden.same(logits_of(scheduled, *inputs).detach(), want, "logits with all maps of the teacher")


def copy_none(scheduled, env: dict) -> None:
    """No map is the teacher's."""
    teacher, student, images, schedule = copy_inputs(env, "A2.1 none")
    with torch.no_grad():
        want = student(images)
    got = logits_of(scheduled, teacher, student, images, torch.zeros_like(schedule)).detach()
    hidden.same(got, want, "logits with no map of the teacher")


# --- Task 2: a tempered loss by blocks ---


def loss_of(
    q: Tensor, k: Tensor, q_t: Tensor, k_t: Tensor, scale: float, scale_t: float, tau: float
) -> Tensor:
    """The loss of this edition's variant, with its maps written out."""
    z = torch.einsum("bhid,bhjd->bhij", q, k) * scale
    z_t = torch.einsum("bhid,bhjd->bhij", q_t, k_t) * scale_t
    match hidden.variant("q2"):
        case "a":
            p_t, log_s, factor, floor = torch.softmax(z_t / tau, -1), torch.log_softmax(z, -1), 1, 0
        case "b":
            p_t, log_s, factor = torch.softmax(z_t / tau, -1), torch.log_softmax(z / tau, -1), tau * tau
            floor = torch.special.entr(p_t)
        case "c":
            p_t, log_s, factor, floor = torch.softmax(z_t, -1), torch.log_softmax(z / tau, -1), tau, 0
    return -factor * (p_t * log_s + floor).sum() / math.prod(q.shape[:3])


def pull_inputs(env: dict, task: str, N: int = 24, d_t: int = 4, tau: float = 2.5) -> tuple:
    """Queries and keys of a student and of a teacher, both scales, and a temperature."""
    seed = hidden.seed(env, task)
    shapes = ((2, 3, N, width) for width in (4, 4, d_t, d_t))
    return *(hidden.normal(seed + i, *shape) for i, shape in enumerate(shapes)), 0.8, 0.55, tau


def called(tempered, inputs: tuple, block: int) -> Tensor:
    """What an answer returns for its inputs."""
    loss = tempered(*inputs, block)
    if type(loss) is not Tensor or loss.ndim:
        raise AssertionError("tempered has to return one number, as a tensor without axes")
    return loss


def right_value(tempered, inputs: tuple, block: int) -> None:
    """The value is right; all other tests need that first."""
    copies = [part.clone() if isinstance(part, Tensor) else part for part in inputs]
    hidden.same(called(tempered, copies, block).detach(), loss_of(*inputs), f"loss by blocks of {block}")


def leaves(inputs: tuple) -> tuple:
    """The same inputs, with tensors that take a gradient."""
    return tuple(part.clone().requires_grad_() if isinstance(part, Tensor) else part for part in inputs)


def right_gradients(tempered, inputs: tuple, block: int, factor: float = 1.0) -> None:
    """The gradients by q and k are right, and none reaches the teacher."""
    right, ours = leaves(inputs), leaves(inputs)
    (factor * loss_of(*right)).backward()
    loss = called(tempered, ours, block)
    if not loss.requires_grad:
        raise AssertionError("no gradient reaches q and k")
    (factor * loss).backward()
    for name, leaf, want in zip("qk", ours, right):
        got = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        hidden.same(got, want.grad, f"gradient by {name} of {factor:g} times the loss, by blocks of {block}")
    if any(leaf.grad is not None and float(leaf.grad.abs().max()) > 0 for leaf in ours[2:4]):
        raise AssertionError("the teacher gets a gradient")


def pull_values(tempered, env: dict) -> None:
    """The values are right at temperatures above 1 and below, in blocks and in one."""
    for tau, block in ((2.5, 8), (0.4, 6), (1.0, 24)):
        right_value(tempered, pull_inputs(env, f"A2.2 {tau}", tau=tau), block)


def pull_gradcheck(tempered, env: dict) -> None:
    """The gradients are those of the value, which is the right one: finite differences say so."""
    inputs = pull_inputs(env, "A2.2 check", N=6)
    right_value(tempered, inputs, 3)
    q, k = (tensor.clone().requires_grad_() for tensor in inputs[:2])
    try:
        torch.autograd.gradcheck(lambda q, k: tempered(q, k, *inputs[2:], 3), (q, k))
    except RuntimeError as error:
        first = str(error).splitlines()[0]
        raise AssertionError(f"gradcheck: the gradients are not those of the value. {first}") from None


def pull_factor(tempered, env: dict) -> None:
    """The loss is a part of a larger one: the gradient from above counts."""
    inputs = pull_inputs(env, "A2.2 factor")
    right_value(tempered, inputs, 8)
    right_gradients(tempered, inputs, 8, -2.5)


class _Largest(TorchDispatchMode):
    """Remembers how many numbers the largest tensor holds that is made."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor):
                self.numbers = max(self.numbers, tensor.numel())
        return result


@contextmanager
def kept_numbers(sizes: list):
    """Collect how many numbers each tensor holds that waits for the backward pass."""

    def pack(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


def pull_largest(tempered, env: dict) -> None:
    """No tensor is larger than a block's map, on the way there and back."""
    inputs = pull_inputs(env, "A2.2 largest", N=96)
    right_value(tempered, inputs, 16)
    ours, largest = leaves(inputs), _Largest()
    with largest:
        called(tempered, ours, 16).backward()
    if largest.numbers > 2 * 3 * 16 * 96:
        raise AssertionError(
            f"a tensor of {largest.numbers} numbers was made; a block's map has {2 * 3 * 16 * 96}"
        )


def pull_kept(tempered, env: dict) -> None:
    """What waits for the backward pass grows with N, not with its square."""
    inputs = pull_inputs(env, "A2.2 kept", N=96)
    right_value(tempered, inputs, 16)
    sizes: list[int] = []
    with kept_numbers(sizes):
        result = called(tempered, leaves(inputs), 16)
    if not result.requires_grad:
        raise AssertionError("no gradient reaches q and k")
    if sum(sizes) > 32 * 2 * 3 * 96:
        raise AssertionError(
            f"{sum(sizes)} numbers wait for the backward pass: those are the maps of all blocks"
        )


def pull_short_block(tempered, env: dict) -> None:
    """The number of queries is no multiple of the block's size, or is smaller."""
    for N, block in ((19, 8), (5, 8)):
        inputs = pull_inputs(env, f"A2.2 short {N}", N=N)
        right_value(tempered, inputs, block)
        right_gradients(tempered, inputs, block)


def pull_unequal_widths(tempered, env: dict) -> None:
    """The teacher's heads are wider than the student's, or narrower."""
    for d_t in (7, 2):
        inputs = pull_inputs(env, f"A2.2 widths {d_t}", d_t=d_t)
        right_value(tempered, inputs, 8)
        right_gradients(tempered, inputs, 8)


# --- Task 3: the weights that were handed in ---

FILE, LARGEST = Path("student.safetensors"), 2_000_000  # bytes
# Nats, summed over layers: six instructors' students had 0.03, an untrained one 4, one of other heads 5.
LOOSE, CLOSE = 1.0, 0.2
# Of 1,000 images: six instructors' students were right on 64 to 69 %, one from scratch on 13 to 16 %.
LEARNED, WELL = 0.35, 0.55
# The beginning of `blocks.0.mlp.fc1.weight` in the model solution's file, which is public. fmt: off
OPEN_WEIGHTS = (
    0.00626,
    -0.00288,
    0.00632,
    -0.00110,
    -0.02644,
    0.01409,
    -0.02377,
    0.00574,
    -0.01756,
    0.01714,
    -0.00044,
    -0.01136,
    0.02049,
    0.01997,
    -0.03656,
    -0.01950,
)
# fmt: on


def weights() -> dict[str, Tensor]:
    """The tensors that were handed in; read as safetensors and as nothing else."""
    if not FILE.is_file():
        raise AssertionError(f"{FILE} was not handed in with the notebook")
    if FILE.stat().st_size > LARGEST:
        raise AssertionError(f"{FILE} has more than 2 MB: it does not hold this student alone")
    try:
        tensors, _ = read_tensors(FILE)
    except OSError:
        raise AssertionError(f"{FILE} is no safetensors file that can be read") from None
    return tensors


@lru_cache
def handed_in(student: str | None) -> torch.nn.Module:
    """The student with the weights that were handed in."""
    tensors = weights()
    model = create_vit("glyphs", embed_dim=48)
    want = {name: value.shape for name, value in model.state_dict().items()}
    if {name: value.shape for name, value in tensors.items()} != want:
        raise AssertionError(f'{FILE} does not hold the weights of create_vit("glyphs", embed_dim=48)')
    if not all(bool(value.isfinite().all()) for value in tensors.values()):
        raise AssertionError(f"{FILE} holds numbers that are nan or infinite")
    first = tensors["blocks.0.mlp.fc1.weight"].double().flatten()[: len(OPEN_WEIGHTS)]
    alike = torch.corrcoef(torch.stack([first, torch.tensor(OPEN_WEIGHTS, dtype=torch.float64)]))[0, 1]
    if float(alike) > 0.9 and student != "model solution":
        raise AssertionError(f"{FILE} holds the weights of the model solution")
    model.load_state_dict(tensors)
    return model.eval()


def held_out(env: dict, task: str, number: int):
    """Images of Match that only this edition has."""
    return glyph_images(generate("test", number, seed=hidden.seed(env, task), world=World("match")))


def own_heads(student: str | None) -> list[list[int]]:
    """Which of the teacher's heads each of the student's learns from, layer by layer."""
    drawn = torch.Generator().manual_seed(own_seed(student, "a2/3"))
    return [torch.randperm(4, generator=drawn).tolist() for _ in range(4)]


def distance(env: dict) -> float:
    """How far the student's maps are from those of its heads: the divergence, summed over layers, in nats."""
    student, heads = handed_in(env.get("STUDENT")), own_heads(env.get("STUDENT"))
    images, _ = held_out(env, "A2.3 maps", 300).take(range(300))
    total = 0.0
    with torch.no_grad():
        pairs = zip(walk(student, images).layers, walk(load_vit("teacher-match.safetensors"), images).layers)
        for (seen_s, seen_t), order in zip(pairs, heads):
            p = torch.stack([seen_t.map[:, head] for head in order], 1).double()
            log_s = seen_s.scores.double().log_softmax(-1)
            total += float((torch.xlogy(p, p) - p * log_s).sum(-1).mean())
    return total


def near(env: dict, limit: float) -> None:
    """The student's maps are those of its own heads."""
    nats = distance(env)
    if not nats < limit:
        raise AssertionError(
            f"the maps are {nats:.2f} nats from those of your heads, summed over layers; less than {limit:g}"
            " is asked for"
        )


def accuracy(env: dict, least: float) -> None:
    """A student that learned from its own heads is right on enough of the edition's images."""
    near(env, LOOSE)
    images, labels = held_out(env, "A2.3 images", 1000).take(range(1000))
    with torch.no_grad():
        share = int((handed_in(env.get("STUDENT"))(images).argmax(-1) == labels).sum()) / 1000
    if not share >= least:
        raise AssertionError(f"right on {100 * share:.1f} % of 1,000 images, not on {100 * least:.0f} %")


def student_maps(env: dict) -> None:
    """The maps are those of the student's own heads."""
    near(env, CLOSE)


def student_learned(env: dict) -> None:
    """The student is far above one that did not distill."""
    accuracy(env, LEARNED)


def student_learned_well(env: dict) -> None:
    """The student is as good as an instructor's."""
    accuracy(env, WELL)
