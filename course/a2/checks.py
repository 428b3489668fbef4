"""Tasks of assignment A2, Pull on the maps: three variants of each, of which an edition has one."""

from collections.abc import Callable

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from atbook.exercises.ch03 import first_tokens, pictures, queries_keys_values
from atbook.exercises.inputs import normal, vit
from atbook.exercises.judging import Exercise, checker, told
from atlib import walk
from atlib.attention import Instead

# --- A2.1: (teacher, student, images, schedule) to logits ---


def mixed(share: Tensor, p_t: Tensor, p_s: Tensor) -> Tensor:
    """The teacher's map by its share (B,) or (B, H), the student's by the rest."""
    share = share[(...,) + (None,) * (4 - share.ndim)]
    return share * p_t + (1 - share) * p_s


def own_fixed(share: Tensor, p_t: Tensor, p_s: Tensor) -> Tensor:
    """Wrong: no gradient reaches the student's own map."""
    return mixed(share, p_t, p_s.detach())


def teacher_learns(share: Tensor, p_t: Tensor, p_s: Tensor) -> Tensor:
    """The mix itself; `scheduled` then lets gradients reach the teacher."""
    return mixed(share, p_t, p_s)


def scores_mixed(share: Tensor, p_t: Tensor, p_s: Tensor) -> Tensor:
    """Wrong: logarithms are mixed, and the softmax taken again."""
    return mixed(share, p_t.log(), p_s.log()).softmax(-1)


def scheduled(mix: Callable = mixed, edit: Callable = lambda schedule: schedule) -> Callable:
    """A student that uses its teacher's maps where a schedule says so. mix: makes a map from the schedule's
    line, the teacher's map and the student's; edit: changes the schedule first."""

    def forward(
        teacher: VisionTransformer, student: VisionTransformer, images: Tensor, schedule: Tensor
    ) -> Tensor:
        t, s = first_tokens(teacher, images), first_tokens(student, images)
        for block_t, block_s, line in zip(teacher.blocks, student.blocks, edit(schedule).to(images)):
            q_t, k_t, _ = queries_keys_values(block_t.attn, block_t.norm1(t))
            p_t = (q_t @ k_t.mT * block_t.attn.scale).softmax(-1)
            q, k, v = queries_keys_values(block_s.attn, block_s.norm1(s))
            p_s = (q @ k.mT * block_s.attn.scale).softmax(-1)
            p = mix(line, p_t if mix is teacher_learns else p_t.detach(), p_s)
            t = block_t(t)
            s = s + block_s.attn.proj((p @ v).transpose(1, 2).flatten(2))
            s = s + block_s.mlp(block_s.norm2(s))
        return student.head(student.norm(s)[:, 0])

    return forward


def by_walking(
    teacher: VisionTransformer, student: VisionTransformer, images: Tensor, schedule: Tensor
) -> Tensor:
    """The same by atlib, a walk for each layer."""
    with torch.no_grad():
        of_teacher = [seen.map for seen in walk(teacher, images).layers]
    replace = {}
    for i, line in enumerate(schedule.to(images)):
        p_s = walk(student, images, replace=replace, stop_after=i).layers[i].map
        replace[i] = Instead(map=mixed(line, of_teacher[i], p_s))
    return walk(student, images, replace=replace).logits


def of_the_students_tokens(
    teacher: VisionTransformer, student: VisionTransformer, images: Tensor, schedule: Tensor
) -> Tensor:
    """The teacher's layers were given the student's tokens. The teacher is run on its own, from the image on,
    whatever the schedule says."""
    s = first_tokens(student, images)
    for block_t, block_s, line in zip(teacher.blocks, student.blocks, schedule.to(images)):
        with torch.no_grad():
            q_t, k_t, _ = queries_keys_values(block_t.attn, block_t.norm1(s))
            p_t = (q_t @ k_t.mT * block_t.attn.scale).softmax(-1)
        q, k, v = queries_keys_values(block_s.attn, block_s.norm1(s))
        p = mixed(line, p_t, (q @ k.mT * block_s.attn.scale).softmax(-1))
        s = s + block_s.attn.proj((p @ v).transpose(1, 2).flatten(2))
        s = s + block_s.mlp(block_s.norm2(s))
    return student.head(student.norm(s)[:, 0])


def coins(*shape: int, seed: int) -> Tensor:
    """Zeros and ones."""
    return (normal(*shape, seed=seed) > 0).double()


def shares(*shape: int, seed: int) -> Tensor:
    """Numbers between 0 and 1."""
    return normal(*shape, seed=seed).sigmoid()


UPSIDE_DOWN = {
    "The schedule is read from the last layer on: line 0 belongs to layer 0.": scheduled(
        edit=lambda schedule: schedule.flip(0)
    )
}
SCHEDULES = {
    **told(of_the_students_tokens),
    "Teacher and student are exchanged: 1 is the teacher's map, 0 the student's.": scheduled(
        edit=lambda schedule: 1 - schedule
    ),
    "The logits are right, but a gradient reaches the"
    " teacher through its maps. They are constants.": scheduled(teacher_learns),
    "The first image's schedule was used for all. Every image has its own.": scheduled(
        edit=lambda schedule: schedule[:, :1].expand_as(schedule)
    ),
}

# --- A2.2: (q, k, q_t, k_t, scale, scale_t, tau, block) to a mean over rows ---


def cross_entropy(z: Tensor, z_t: Tensor) -> Tensor:
    """The cross-entropy of each row, from scores (..., N)."""
    return -(z_t.softmax(-1) * z.log_softmax(-1)).sum(-1)


def to_a_tempered_teacher(z: Tensor, z_t: Tensor, tau: float) -> Tensor:
    """Variant a: only the teacher's scores are divided by τ."""
    return cross_entropy(z, z_t / tau)


def both_tempered(z: Tensor, z_t: Tensor, tau: float) -> Tensor:
    """Variant b: τ² times the divergence of maps that are both tempered."""
    return tau**2 * (cross_entropy(z / tau, z_t / tau) - cross_entropy(z_t / tau, z_t / tau))


def tempered_student(z: Tensor, z_t: Tensor, tau: float) -> Tensor:
    """Variant c: τ times the cross-entropy, where only the student's scores are divided by τ."""
    return tau * cross_entropy(z / tau, z_t)


def by_blocks(rows: Callable, last: bool = True, whole: bool = False, means: bool = False) -> Callable:
    """The mean over rows of a loss, by blocks of queries. The options make mistakes: without the `last` short
    block, with a `whole` map, as a mean of the blocks' `means`."""

    def loss(
        q: Tensor, k: Tensor, q_t: Tensor, k_t: Tensor, scale: float, scale_t: float, tau: float, block: int
    ) -> Tensor:
        N = q.shape[2]
        parts = []
        for queries, some_t in zip(*(tensor.split(N if whole else block, 2) for tensor in (q, q_t.detach()))):
            if last or queries.shape[2] == block:
                parts.append(rows(scale * queries @ k.mT, scale_t * some_t @ k_t.detach().mT, tau))
        if means:
            return torch.stack([losses.mean() for losses in parts]).mean()
        return sum(losses.sum() for losses in parts) / (q.shape[0] * q.shape[1] * N)

    return loss


def not_detached(rows: Callable) -> Callable:
    """Wrong: the teacher gets a gradient."""

    def loss(
        q: Tensor, k: Tensor, q_t: Tensor, k_t: Tensor, scale: float, scale_t: float, tau: float, block: int
    ) -> Tensor:
        pairs = zip(q.split(block, 2), q_t.split(block, 2))
        losses = [rows(scale * queries @ k.mT, scale_t * some_t @ k_t.mT, tau) for queries, some_t in pairs]
        return torch.cat(losses, 2).mean()

    return loss


class _ByHand(torch.autograd.Function):
    """A loss of rows by blocks, whose gradients are made in the forward pass."""

    @staticmethod
    def forward(ctx, q, k, q_t, k_t, scale, scale_t, tau, block, rows, slope):
        total, by_q, by_k = 0.0, [], torch.zeros_like(k)
        for queries, some_t in zip(q.split(block, 2), q_t.split(block, 2)):
            z, z_t = scale * queries @ k.mT, scale_t * some_t @ k_t.mT
            total = total + rows(z, z_t, tau).sum()
            by_z = slope(z, z_t, tau)
            by_q.append(by_z @ k)
            by_k += by_z.mT @ queries
        number = q.shape[0] * q.shape[1] * q.shape[2]
        ctx.save_for_backward(torch.cat(by_q, 2) * (scale / number), by_k * (scale / number))
        return total / number

    @staticmethod
    def backward(ctx, above):
        return *(above * gradient for gradient in ctx.saved_tensors), *(None,) * 8


def by_hand(rows: Callable, slope: Callable) -> Callable:
    """The same with the gradients by hand."""
    return lambda *inputs: _ByHand.apply(*inputs, rows, slope)


def difference(tau_s: bool, tau_t: bool) -> Callable:
    """p_s - p_t, each tempered or not."""
    return lambda z, z_t, tau: (
        (z / tau if tau_s else z).softmax(-1) - (z_t / tau if tau_t else z_t).softmax(-1)
    )


def layer(images: int, H: int, N: int, d: int, d_t: int, tau: float, block: int) -> Callable[[], tuple]:
    """Queries and keys of a student and of a teacher, both scales, a temperature, and the size of a block."""
    shapes = ((images, H, N, width) for width in (d, d, d_t, d_t))
    made = [normal(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    return lambda: (*(tensor.clone() for tensor in made), 0.7, 0.6, tau, block)


LAYERS = {
    "150 tokens in blocks of 64": layer(1, 2, 150, 4, 4, 2.0, 64),
    "90 tokens in blocks of 20, a wider teacher": layer(2, 1, 90, 4, 6, 0.5, 20),
}


def blocks_wrong(rows: Callable) -> dict[str, Callable]:
    """The mistakes that a loss by blocks can have."""
    return {
        "The numbers are right, but a whole map was written out. Take `block` queries at a time.": by_blocks(
            rows, whole=True
        ),
        "The last, shorter block was left out: N need not be a multiple of `block`.": by_blocks(
            rows, last=False
        ),
        "Blocks' means were averaged, though the last one"
        " is shorter. Add up, and divide by B·H·N once.": by_blocks(rows, means=True),
        "The value is right, but a gradient reaches the teacher. It is a constant.": not_detached(rows),
    }


EXERCISES = (
    Exercise(
        "A2.1a",
        right=scheduled(),
        also_right=(by_walking,),
        grads=("teacher", "student"),
        cases={
            "3 images": lambda: (vit(0), vit(1), pictures(3, 2), coins(3, 3, seed=3)),
            "a wider teacher": lambda: (vit(4, embed_dim=24), vit(5), pictures(2, 6), coins(3, 2, seed=8)),
        },
        wrong=SCHEDULES | UPSIDE_DOWN,
    ),
    Exercise(
        "A2.1b",
        right=scheduled(),
        also_right=(by_walking,),
        grads=("teacher", "student"),
        cases={
            "3 images": lambda: (vit(0), vit(1), pictures(3, 2), coins(3, 3, 3, seed=3)),
            "a wider teacher": lambda: (vit(4, embed_dim=24), vit(5), pictures(2, 6), coins(3, 2, 3, seed=7)),
        },
        wrong={
            **SCHEDULES,
            "Where one head was to use the teacher's map, all"
            " heads did. Each head has its own entry.": scheduled(edit=lambda schedule: schedule.amax(-1)),
            **UPSIDE_DOWN,
        },
    ),
    Exercise(
        "A2.1c",
        right=scheduled(),
        also_right=(by_walking,),
        grads=("teacher", "student"),
        cases={
            "3 images": lambda: (vit(0), vit(1), pictures(3, 2), shares(3, 3, seed=3)),
            "a wider teacher": lambda: (vit(4, embed_dim=24), vit(5), pictures(2, 6), shares(3, 2, seed=7)),
        },
        wrong={
            **SCHEDULES,
            "The scores were mixed, before the softmax. Mix the maps, after it.": scheduled(scores_mixed),
            "The logits are right, but no gradient reaches the"
            " student's own map: its q and k have to learn, too.": scheduled(own_fixed),
        },
    ),
    Exercise(
        "A2.2a",
        right=by_blocks(to_a_tempered_teacher),
        also_right=(by_hand(to_a_tempered_teacher, difference(False, True)),),
        grads=("q", "k", "q_t", "k_t"),
        largest=1 * 2 * 64 * 150,
        cases=LAYERS,
        wrong={
            "The temperature is forgotten.": by_blocks(lambda z, z_t, tau: cross_entropy(z, z_t)),
            "The student's scores were divided by τ, too. Only the teacher is tempered here.": by_blocks(
                lambda z, z_t, tau: cross_entropy(z / tau, z_t / tau)
            ),
            "The student's scores were divided by τ, not the teacher's.": by_blocks(
                lambda z, z_t, tau: cross_entropy(z / tau, z_t)
            ),
            "The teacher's scores were multiplied by τ. Divide them"
            " by it: a large τ makes maps even.": by_blocks(lambda z, z_t, tau: cross_entropy(z, tau * z_t)),
            **blocks_wrong(to_a_tempered_teacher),
        },
    ),
    Exercise(
        "A2.2b",
        right=by_blocks(both_tempered),
        also_right=(by_hand(both_tempered, lambda z, z_t, tau: tau * difference(True, True)(z, z_t, tau)),),
        grads=("q", "k", "q_t", "k_t"),
        largest=1 * 2 * 64 * 150,
        cases=LAYERS,
        wrong={
            "The factor τ² is missing.": by_blocks(lambda z, z_t, tau: both_tempered(z, z_t, tau) / tau**2),
            "The factor is τ, not τ². The gradient shrinks with τ twice:"
            " by the slope and by the maps.": by_blocks(lambda z, z_t, tau: both_tempered(z, z_t, tau) / tau),
            "The gradients are right, the value is the cross-entropy: the teacher's entropy"
            " is not taken away.": by_blocks(lambda z, z_t, tau: tau**2 * cross_entropy(z / tau, z_t / tau)),
            "Only the teacher's scores were divided by τ. Here both are.": by_blocks(
                lambda z, z_t, tau: both_tempered(z * tau, z_t, tau)
            ),
            **blocks_wrong(both_tempered),
        },
    ),
    Exercise(
        "A2.2c",
        right=by_blocks(tempered_student),
        also_right=(by_hand(tempered_student, difference(True, False)),),
        grads=("q", "k", "q_t", "k_t"),
        largest=1 * 2 * 64 * 150,
        cases=LAYERS,
        wrong={
            "The temperature is forgotten.": by_blocks(lambda z, z_t, tau: cross_entropy(z, z_t)),
            "The factor τ is missing.": by_blocks(lambda z, z_t, tau: cross_entropy(z / tau, z_t)),
            "The factor is τ², not τ. Only one of the two maps is tempered,"
            " so the slope shrinks once.": by_blocks(lambda z, z_t, tau: tau * tempered_student(z, z_t, tau)),
            "The teacher's scores were divided by τ, too. Only the student is tempered here.": by_blocks(
                lambda z, z_t, tau: tau * cross_entropy(z / tau, z_t / tau)
            ),
            **blocks_wrong(tempered_student),
        },
    ),
)

check = checker(EXERCISES)
