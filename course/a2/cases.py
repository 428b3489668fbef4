"""What the hidden tests of A2 ask; `course/a2/master.md` gives each its points."""

import math
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, nn

from atbook.cage.values import Model
from atbook.exercises.inputs import SMALL, vit
from atbook.exercises.own import own_seed
from atbook.worlds import glyph_images
from atbook.worlds.glyphs import World, generate
from atlib import create_vit, walk
from atlib.attention import Instead
from atlib.checkpoint import load_vit
from course import hidden
from course.hidden import Asked

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


def copy_inputs(asked: Asked, task: str, **wider) -> tuple:
    """Two ViTs of three layers, four images, and the shape of this edition's schedule."""
    seed, letter = asked.seed(task), asked.variants["q1"]
    shape = {"a": (3, 4), "b": (3, 4, 3), "c": (3, 4)}[letter]
    drawn = hidden.normal(seed + 3, *shape)
    schedule = drawn.sigmoid() if letter == "c" else (drawn > 0).double()
    return vit(seed, **wider), vit(seed + 1), hidden.normal(seed + 2, 4, 3, 16, 16), schedule


def sent(model: nn.Module) -> Model:
    """A ViT as it goes into the cage."""
    return Model(SMALL | {"embed_dim": model.embed_dim}, model.state_dict())


def logits_of(scheduled, teacher, student, images: Tensor, schedule: Tensor):
    """The logits of an answer."""
    return scheduled(sent(teacher), sent(student), images, schedule)


def copy_values(scheduled, asked: Asked) -> None:
    """The logits are right with a teacher whose heads are wider."""
    inputs = copy_inputs(asked, "A2.1", embed_dim=24)
    with torch.no_grad():
        want = copied(*inputs)
    hidden.same(logits_of(scheduled, *inputs), want, "logits")


def copy_gradients(scheduled, asked: Asked) -> None:
    """The gradients of all parameters of the student are right, and the teacher gets none."""
    teacher, student, images, schedule = copy_inputs(asked, "A2.1 gradients")
    weights = hidden.normal(asked.seed("A2.1 weights"), 4, 5)
    leaves = dict(student.named_parameters())
    total = (copied(teacher, student, images, schedule) * weights).sum()
    want = torch.autograd.grad(total, [*leaves.values()], allow_unused=True)
    inputs = (sent(teacher), sent(student), images, schedule)
    _, got = scheduled.gradients(inputs, of=(1, 0), weights=weights)
    if got is None:
        raise AssertionError("no gradient reaches the student: the logits hang on none of its parameters")
    for (name, leaf), w, g in zip(leaves.items(), want, got):
        hidden.same(g, torch.zeros_like(leaf) if w is None else w, f"gradient of the student's {name}")
    if any(float(g.abs().max()) > 0 for g in got[len(leaves) :]):
        raise AssertionError("the teacher gets a gradient")


def heeded(scheduled, *inputs) -> None:
    """What never looks at its schedule has no points for one that happens to fit."""
    all_of_it, none = (
        logits_of(scheduled, *inputs[:3], torch.full_like(inputs[3], share)) for share in (1, 0)
    )
    if torch.allclose(all_of_it, none):
        raise AssertionError("the logits are the same with all maps of the teacher and with none")


def copy_all(scheduled, asked: Asked) -> None:
    """Every map is the teacher's, and the teacher looks at its own tokens."""
    *models, images, schedule = copy_inputs(asked, "A2.1 all")
    inputs = *models, images, torch.ones_like(schedule)
    with torch.no_grad():
        want = copied(*inputs)
    hidden.same(logits_of(scheduled, *inputs), want, "logits with all maps of the teacher")
    heeded(scheduled, *inputs)


def copy_none(scheduled, asked: Asked) -> None:
    """No map is the teacher's."""
    teacher, student, images, schedule = copy_inputs(asked, "A2.1 none")
    with torch.no_grad():
        want = student(images)
    got = logits_of(scheduled, teacher, student, images, torch.zeros_like(schedule))
    hidden.same(got, want, "logits with no map of the teacher")
    heeded(scheduled, teacher, student, images, schedule)


# --- Task 2: a tempered loss by blocks ---


def loss_of(
    letter: str, q: Tensor, k: Tensor, q_t: Tensor, k_t: Tensor, scale: float, scale_t: float, tau: float
) -> Tensor:
    """The loss of this edition's variant, with its maps written out."""
    z = torch.einsum("bhid,bhjd->bhij", q, k) * scale
    z_t = torch.einsum("bhid,bhjd->bhij", q_t, k_t) * scale_t
    match letter:
        case "a":
            p_t, log_s, factor, floor = torch.softmax(z_t / tau, -1), torch.log_softmax(z, -1), 1, 0
        case "b":
            p_t, log_s, factor = torch.softmax(z_t / tau, -1), torch.log_softmax(z / tau, -1), tau * tau
            floor = torch.special.entr(p_t)
        case "c":
            p_t, log_s, factor, floor = torch.softmax(z_t, -1), torch.log_softmax(z / tau, -1), tau, 0
    return -factor * (p_t * log_s + floor).sum() / math.prod(q.shape[:3])


def pull_inputs(asked: Asked, task: str, N: int = 24, d_t: int = 4, tau: float = 2.5) -> tuple:
    """Queries and keys of a student and of a teacher, both scales, and a temperature."""
    seed = asked.seed(task)
    shapes = ((2, 3, N, width) for width in (4, 4, d_t, d_t))
    return *(hidden.normal(seed + i, *shape) for i, shape in enumerate(shapes)), 0.8, 0.55, tau


def number(loss) -> Tensor:
    """What an answer returned, which has to be one number."""
    if not isinstance(loss, (float, Tensor)) or (isinstance(loss, Tensor) and loss.ndim):
        raise AssertionError("tempered has to return one number, as a tensor without axes")
    return loss


def right_value(tempered, asked: Asked, inputs: tuple, block: int) -> None:
    """The value is right; all other tests need that first."""
    want = loss_of(asked.variants["q2"], *inputs)
    hidden.same(number(tempered(*inputs, block)), want, f"loss by blocks of {block}")


def right_gradients(tempered, asked: Asked, inputs: tuple, block: int, factor: float = 1.0) -> None:
    """The gradients by q and k are right, and none reaches the teacher."""
    leaves = tuple(part.clone().requires_grad_() if isinstance(part, Tensor) else part for part in inputs)
    want = torch.autograd.grad(factor * loss_of(asked.variants["q2"], *leaves), leaves[:2])
    loss, got = tempered.gradients((*inputs, block), of=(0, 1, 2, 3), weights=torch.tensor(factor).double())
    number(loss)
    if got is None:
        raise AssertionError("no gradient reaches q and k")
    for name, g, w in zip("qk", got, want):
        hidden.same(g, w, f"gradient by {name} of {factor:g} times the loss, by blocks of {block}")
    if any(float(g.abs().max()) > 0 for g in got[2:]):
        raise AssertionError("the teacher gets a gradient")


def pull_values(tempered, asked: Asked) -> None:
    """The values are right at temperatures above 1 and below, in blocks and in one."""
    for tau, block in ((2.5, 8), (0.4, 6), (1.0, 24)):
        right_value(tempered, asked, pull_inputs(asked, f"A2.2 {tau}", tau=tau), block)


def pull_gradcheck(tempered, asked: Asked) -> None:
    """The gradients are those of the value, which is the right one."""
    inputs = pull_inputs(asked, "A2.2 check", N=6)
    right_value(tempered, asked, inputs, 3)
    right_gradients(tempered, asked, inputs, 3, 0.7)


def pull_factor(tempered, asked: Asked) -> None:
    """The loss is a part of a larger one: the gradient from above counts."""
    inputs = pull_inputs(asked, "A2.2 factor")
    right_value(tempered, asked, inputs, 8)
    right_gradients(tempered, asked, inputs, 8, -2.5)


# With 2 heads of 2,048 tokens a whole map has 67 MB, a block's map 1 MB.
LONG, MOST = 2048, 40e6
ONE_BLOCK = """
def least(q, k, q_t, k_t, scale, scale_t, tau, block):
    p_t = (q_t[:, :, :block] @ k_t.mT).softmax(-1)
    return -(p_t * (q[:, :, :block] @ k.mT).log_softmax(-1)).sum()
"""


def memory(tempered, asked: Asked, of: tuple[int, ...]) -> None:
    """How much more memory the process needs for all of many tokens than for one block of them, in the same
    cage, stays far below a map. Nobody knows how many there will be, and the results have to be right as
    well: no length is a case of its own."""
    seed = asked.seed(f"A2.2 memory {len(of)}")
    N = LONG + 32 * (seed % 8)
    inputs = *(hidden.normal(seed + i, 1, 2, N, 4) for i in range(4)), 0.8, 0.55, 2.5
    leaves = [part.requires_grad_(at in of) for at, part in enumerate(inputs[:4])]
    want = loss_of(asked.variants["q2"], *leaves, *inputs[4:])
    wanted = torch.autograd.grad(want, [leaves[at] for at in of]) if of else ()
    sent = (*(part.detach() for part in leaves), *inputs[4:], 32)
    *_, least = tempered.beside(ONE_BLOCK, "least").measured(sent, of, no_grad=not of)
    loss, got, peak = tempered.measured(sent, of, no_grad=not of)
    hidden.same(number(loss), want, f"loss of {N} tokens by blocks of 32")
    if of and got is None:
        raise AssertionError("no gradient reaches q and k")
    for name, g, w in zip("qk", got or (), wanted):  # a wrong factor costs its points elsewhere
        hidden.same(g / g.norm(), w / w.norm(), f"direction of the gradient by {name} of {N} tokens")
    if peak - least > MOST:
        raise AssertionError(
            f"{(peak - least) / 1e6:.0f} MB were needed for {N} tokens in blocks of 32, not less than"
            f" {MOST / 1e6:.0f}: a whole map has {2 * N**2 * 8 / 1e6:.0f} MB"
        )


def pull_largest(tempered, asked: Asked) -> None:
    """The value alone needs no whole map."""
    memory(tempered, asked, ())


def pull_kept(tempered, asked: Asked) -> None:
    """With the way back, what waits for it is not as much as the maps of all blocks."""
    memory(tempered, asked, (0, 1))


def pull_short_block(tempered, asked: Asked) -> None:
    """The number of queries is no multiple of the block's size, or is smaller."""
    for N, block in ((19, 8), (5, 8)):
        inputs = pull_inputs(asked, f"A2.2 short {N}", N=N)
        right_value(tempered, asked, inputs, block)
        right_gradients(tempered, asked, inputs, block)


def pull_unequal_widths(tempered, asked: Asked) -> None:
    """The teacher's heads are wider than the student's, or narrower."""
    for d_t in (7, 2):
        inputs = pull_inputs(asked, f"A2.2 widths {d_t}", d_t=d_t)
        right_value(tempered, asked, inputs, 8)
        right_gradients(tempered, asked, inputs, 8)


# --- Task 3: the weights that were handed in ---

FILE, LARGEST = "student.safetensors", 2_000_000  # bytes
# Nats, summed over layers: six instructors' students had 0.03, an untrained one 4, one of other heads 5.
LOOSE, CLOSE = 1.0, 0.2
# Of 1,000 images: six instructors' students were right on 64 to 69 %, one from scratch on 13 to 16 %.
LEARNED, WELL = 0.35, 0.55
# The model solution's file is public. Its weights in another order are its weights: the singular values of
# its matrices are the same, whatever heads, channels and hidden units are called.
OPEN = Path(__file__).with_name(FILE)
MATRICES = tuple(f"blocks.{layer}.mlp.fc{part}.weight" for layer in range(4) for part in (1, 2))
# The largest difference of two spectra that are taken for one. Measured: 0.11 to 0.15 between students who
# began alike and learned from other heads, 0.02 where a fifth of its spread was added to every matrix.
ALIKE = 0.05


def spectra(tensors: dict[str, Tensor]) -> Tensor:
    """What no renaming of heads, channels or hidden units changes, nor another scale: (matrices, singular
    values), the largest 1."""
    values = torch.stack([torch.linalg.svdvals(tensors[name].double()) for name in MATRICES])
    return values / values[:, :1]


@lru_cache
def spectra_of(content: bytes) -> Tensor | None:
    """The same of a file; None where it holds no such student."""
    try:
        return spectra(load(content)) if len(content) <= LARGEST else None
    except Exception:  # it is said elsewhere what is wrong with it
        return None


def same_uploads(first: Mapping[str, bytes], second: Mapping[str, bytes]) -> str:
    """What two works of different students share in the files beside their notebooks; "" for nothing."""
    one, other = (spectra_of(uploads.get(FILE, b"")) for uploads in (first, second))
    if one is None or other is None or one.shape != other.shape:
        return ""
    return f"{FILE} is the same, in whichever order" * bool((one - other).abs().amax(1).median() < ALIKE)


def held_out(asked: Asked, task: str, number: int):
    """Images of Match that only this edition has."""
    return glyph_images(generate("test", number, seed=asked.seed(task), world=World("match")))


@lru_cache
def model_of(content: bytes | None, student: str) -> nn.Module:
    """The student with the weights that were handed in; read as safetensors and as nothing else."""
    if content is None:
        raise AssertionError(f"{FILE} was not handed in with the notebook")
    if len(content) > LARGEST:
        raise AssertionError(f"{FILE} has more than 2 MB: it does not hold this student alone")
    try:
        tensors = load(content)
    except (SafetensorError, ValueError, KeyError, OverflowError):
        raise AssertionError(f"{FILE} is no safetensors file that can be read") from None
    model = create_vit("glyphs", embed_dim=48)
    want = {name: value.shape for name, value in model.state_dict().items()}
    if {name: value.shape for name, value in tensors.items()} != want:
        raise AssertionError(f'{FILE} does not hold the weights of create_vit("glyphs", embed_dim=48)')
    if not all(value.is_floating_point() and bool(value.isfinite().all()) for value in tensors.values()):
        raise AssertionError(f"{FILE} holds numbers that are nan or infinite")
    if student != "model solution":
        of_student, of_solution = spectra(tensors), spectra(load(OPEN.read_bytes()))
        if float((of_student - of_solution).abs().amax(1).median()) < ALIKE:
            raise AssertionError(f"{FILE} holds the weights of the model solution, in whichever order")
    model.load_state_dict(tensors)
    return model.eval()


def handed_in(asked: Asked) -> nn.Module:
    """The student that was handed in."""
    return model_of(asked.uploads.get(FILE), asked.named())


def own_heads(student: str) -> list[list[int]]:
    """Which of the teacher's heads each of the student's learns from, layer by layer."""
    drawn = torch.Generator().manual_seed(own_seed(student, "a2/3"))
    return [torch.randperm(4, generator=drawn).tolist() for _ in range(4)]


def distance(asked: Asked) -> float:
    """How far the student's maps are from those of its heads: the divergence, summed over layers, in nats."""
    student, heads = handed_in(asked), own_heads(asked.named())
    images, _ = held_out(asked, "A2.3 maps", 300).take(range(300))
    total = 0.0
    with torch.no_grad():
        pairs = zip(
            walk(student, images).layers,
            walk(load_vit(asked.files / "teacher-match.safetensors"), images).layers,
        )
        for (seen_s, seen_t), order in zip(pairs, heads):
            p = torch.stack([seen_t.map[:, head] for head in order], 1).double()
            log_s = seen_s.scores.double().log_softmax(-1)
            total += float((torch.xlogy(p, p) - p * log_s).sum(-1).mean())
    return total


def near(asked: Asked, limit: float) -> None:
    """The student's maps are those of its own heads."""
    nats = distance(asked)
    if not nats < limit:
        raise AssertionError(
            f"the maps are {nats:.2f} nats from those of your heads, summed over layers; less than {limit:g}"
            " is asked for"
        )


def accuracy(asked: Asked, least: float) -> None:
    """A student that learned from its own heads is right on enough of the edition's images."""
    near(asked, LOOSE)
    images, labels = held_out(asked, "A2.3 images", 1000).take(range(1000))
    with torch.no_grad():
        share = int((handed_in(asked)(images).argmax(-1) == labels).sum()) / 1000
    if not share >= least:
        raise AssertionError(f"right on {100 * share:.1f} % of 1,000 images, not on {100 * least:.0f} %")


def student_maps(asked: Asked) -> None:
    """The maps are those of the student's own heads."""
    near(asked, CLOSE)


def student_learned(asked: Asked) -> None:
    """The student is far above one that did not distill."""
    accuracy(asked, LEARNED)


def student_learned_well(asked: Asked) -> None:
    """The student is as good as an instructor's."""
    accuracy(asked, WELL)
