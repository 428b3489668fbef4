"""Tasks of assignment A1, Attention, taken apart: three variants of each, of which an edition has one."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from atbook.exercises.inputs import maps, normal
from atbook.exercises.judging import Exercise, checker, told

# --- A1.1: (q, k, v, mix) to (output, maps) ---


def scores(q: Tensor, k: Tensor) -> Tensor:
    """Attention logits."""
    return q @ k.mT / q.shape[-1] ** 0.5


def unscaled(q: Tensor, k: Tensor) -> Tensor:
    """Wrong: not divided by √d."""
    return q @ k.mT


def joined(p: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """What heads with maps p get from v, side by side in each token's channels, and the maps."""
    return (p @ v).transpose(1, 2).flatten(2), p


def heads_over_tokens(p: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Wrong: heads and tokens are not exchanged first."""
    return (p @ v).reshape(p.shape[0], p.shape[2], -1), p


def talk(how: str, before: bool = False, scores: Callable = scores, join: Callable = joined) -> Callable:
    """Attention whose heads are mixed as `how` says (an einsum), before the softmax or after it."""

    def talking(q: Tensor, k: Tensor, v: Tensor, mix: Tensor) -> tuple[Tensor, Tensor]:
        z = scores(q, k)
        p = torch.einsum(how, mix, z).softmax(-1) if before else torch.einsum(how, mix, z.softmax(-1))
        return join(p, v)

    return talking


ONE = "gh,bhij->bgij"  # one matrix for all
EACH = "bigh,bhij->bgij"  # a matrix for each query


def as_matrices(q: Tensor, k: Tensor, v: Tensor, mix: Tensor) -> tuple[Tensor, Tensor]:
    """Mixed before the softmax, by one product of matrices an image."""
    z = scores(q, k)
    return joined((mix @ z.flatten(2)).reshape(z.shape).softmax(-1), v)


def head_by_head(q: Tensor, k: Tensor, v: Tensor, mix: Tensor) -> tuple[Tensor, Tensor]:
    """Mixed after the softmax, with loops."""
    p = scores(q, k).softmax(-1)
    return joined(torch.stack([sum(w * p[:, h] for h, w in enumerate(row)) for row in mix], dim=1), v)


def query_by_query(q: Tensor, k: Tensor, v: Tensor, mix: Tensor) -> tuple[Tensor, Tensor]:
    """Mixed after the softmax by a matrix for each query, with a loop."""
    p = scores(q, k).softmax(-1)
    return joined(torch.stack([mix[:, i] @ p[:, :, i] for i in range(p.shape[2])], dim=2), v)


def rows_of_one(p: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Wrong: rows are made to sum to 1 again."""
    return joined(p / p.sum(-1, keepdim=True), v)


def heads(images: int, *mix: int) -> Callable[[], tuple]:
    """q and k of as many heads as a matrix `mix` takes, v of as many as it makes, and the matrix."""
    made, taken = mix[-2:]
    parts = ((images, taken, 5, 4), (images, taken, 5, 4), (images, made, 5, 2), mix)
    return lambda: tuple(normal(*shape, seed=seed) for seed, shape in enumerate(parts))


NO_SCALE = "The scores are not divided by √d."
LAYOUT = (
    "The maps are right, the output's layout is not: the channels of a token are head after head. Exchange"
    " heads and tokens before you join heads and channels."
)
FLIPPED = "The matrix is read the wrong way round: row g says how much new head g takes from each old one."

# --- A1.2: the gradient by q ---


def softmax(z: Tensor) -> Tensor:
    """The softmax over keys."""
    return z.softmax(-1)


def constant_sum(z: Tensor) -> Tensor:
    """Wrong: a softmax whose sum is taken for a constant on the way back."""
    return (z - z.logsumexp(-1, keepdim=True).detach()).exp()


def slope_of(linear: Tensor, z: Tensor) -> Tensor:
    """The values of z, with the gradient of another tensor."""
    return linear + (z - linear).detach()


def sink(q: Tensor, k: Tensor, v: Tensor, softmax: Callable = softmax) -> Tensor:
    """Attention with a key of score 0 that has nothing to say."""
    z = scores(q, k)
    return softmax(torch.cat([torch.zeros_like(z[..., :1]), z], dim=-1))[..., 1:] @ v


def capped(q: Tensor, k: Tensor, v: Tensor, cap: float, softmax: Callable = softmax) -> Tensor:
    """Attention whose scores stay below a cap."""
    return softmax(cap * (scores(q, k) / cap).tanh()) @ v


def mixed(q: Tensor, k: Tensor, v: Tensor, mix: Tensor, softmax: Callable = softmax) -> Tensor:
    """Attention whose scores are mixed across heads."""
    return softmax(torch.einsum(ONE, mix, scores(q, k))) @ v


def no_sink(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Wrong: plain attention."""
    return softmax(scores(q, k)) @ v


def no_slope(q: Tensor, k: Tensor, v: Tensor, cap: float) -> Tensor:
    """Wrong: the cap is passed through on the way back."""
    z = scores(q, k)
    return softmax(slope_of(z, cap * (z / cap).tanh())) @ v


def not_mixed_back(q: Tensor, k: Tensor, v: Tensor, mix: Tensor) -> Tensor:
    """Wrong: every head's gradient stays in its head."""
    z = scores(q, k)
    return softmax(slope_of(z, torch.einsum(ONE, mix, z))) @ v


def mixed_back_flipped(q: Tensor, k: Tensor, v: Tensor, mix: Tensor) -> Tensor:
    """Wrong: the same matrix on the way back, not its transpose."""
    z = scores(q, k)
    return softmax(slope_of(torch.einsum(ONE, mix.mT, z), torch.einsum(ONE, mix, z))) @ v


def gradient(forward: Callable, factor: Callable[[Tensor], float] = lambda q: 1.0, **options) -> Callable:
    """A function of (q, k, v, grad, ...) that returns the gradient of `forward` by q from the gradient by its
    output."""

    def by_autograd(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, *rest) -> Tensor:
        leaf = q.detach().requires_grad_()
        (by_q,) = torch.autograd.grad(forward(leaf, k, v, *rest, **options), leaf, grad)
        return factor(q) * by_q

    return by_autograd


def by_vjp(forward: Callable) -> Callable:
    """The same by a different function of torch."""
    return lambda q, k, v, grad, *rest: torch.func.vjp(lambda x: forward(x, k, v, *rest), q)[1](grad)[0]


def width(q: Tensor) -> float:
    """The factor by which a gradient is too large without 1/√d."""
    return q.shape[-1] ** 0.5


def queries(images: int, many: int, keys: int, *more: Callable) -> Callable[[], tuple]:
    """q, k, v, the gradient by the output, and what else there is; 3 heads."""
    lengths, widths = (many, keys, keys, many), (4, 4, 2, 2)
    sizes = [(images, 3, n, d) for n, d in zip(lengths, widths)]
    return lambda: (
        *(normal(*size, seed=seed) for seed, size in enumerate(sizes)),
        *(make() for make in more),
    )


CONSTANT = (
    "A gradient is missing: all entries of a row share one sum, so each one's score moves all of them. Take"
    " the row's own mean away."
)

# --- A1.3: maps of all layers to (layers, heads) ---


def rows_of(index: Tensor, p: Tensor) -> Tensor:
    """Row `index[b]` of each image's maps (B, H, N, N): (B, H, N)."""
    return p[torch.arange(len(p)), :, index]


def to_the_mark(seen: Sequence[Tensor], cell: Tensor) -> Tensor:
    """The mean share that the other patches give to the marked one."""
    unmarked = 1 - one_hot(cell, seen[0].shape[-1] - 1).double()  # (B, P)
    received = torch.stack([rows_of(cell + 1, p.mT)[..., 1:] for p in seen])  # (L, B, H, P)
    return (received * unmarked[:, None]).sum((1, 3)) / unmarked.sum()


def to_the_mark_by_loops(seen: Sequence[Tensor], cell: Tensor) -> Tensor:
    """The same, image by image."""
    rows = [[i + 1 for i in range(seen[0].shape[-1] - 1) if i != c] for c in cell]
    of_layers = [torch.stack([p[b, :, rows[b], c + 1].mean(-1) for b, c in enumerate(cell)]) for p in seen]
    return torch.stack([of_images.mean(0) for of_images in of_layers])


def from_the_mark(seen: Sequence[Tensor], cell: Tensor) -> Tensor:
    """Wrong: rows and columns exchanged."""
    return to_the_mark([p.mT for p in seen], cell)


def with_itself(seen: Sequence[Tensor], cell: Tensor) -> Tensor:
    """What the marked patch gives to itself is counted. The task asks for the others alone."""
    return torch.stack([rows_of(cell + 1, p.mT)[..., 1:].mean((0, 2)) for p in seen])


def target_to_key(seen: Sequence[Tensor], cell: Tensor, key: Tensor) -> Tensor:
    """What the target's patch gives to the key's."""
    return torch.stack([p[torch.arange(len(p)), :, cell + 1, key + 1].mean(0) for p in seen])


def target_to_key_by_loops(seen: Sequence[Tensor], cell: Tensor, key: Tensor) -> Tensor:
    """The same, image by image."""
    pairs = list(enumerate(zip(cell, key)))
    return torch.stack([sum(p[b, :, c + 1, s + 1] for b, (c, s) in pairs) / len(p) for p in seen])


def to_distractors(seen: Sequence[Tensor], cell: Tensor, key: Tensor) -> Tensor:
    """What the class token gives to patches that are neither key nor target."""
    images = torch.arange(len(cell))
    rows = torch.stack([p[:, :, 0] for p in seen])  # (L, B, H, N)
    named = rows[:, images, :, cell + 1] + rows[:, images, :, key + 1]
    return (rows[..., 1:].sum(-1) - named.transpose(0, 1)).mean(1)


def to_distractors_by_loops(seen: Sequence[Tensor], cell: Tensor, key: Tensor) -> Tensor:
    """The same, image by image."""
    patches = range(seen[0].shape[-1] - 1)
    rest = [[i + 1 for i in patches if i not in (c, s)] for c, s in zip(cell.tolist(), key.tolist())]
    return torch.stack([sum(p[b, :, 0, at].sum(-1) for b, at in enumerate(rest)) / len(p) for p in seen])


def one_token_before(right: Callable) -> Callable:
    """Wrong: a cell's number is taken for its token's."""
    return lambda seen, *cells: right(seen, *(cell - 1 for cell in cells))


def of_patches(right: Callable) -> Callable:
    """Wrong: rows are rescaled to sum to 1 over patches."""

    def rescaled(seen: Sequence[Tensor], *cells: Tensor) -> Tensor:
        among = [torch.cat([p[..., :1], p[..., 1:] / p[..., 1:].sum(-1, keepdim=True)], dim=-1) for p in seen]
        return right(among, *cells)

    return rescaled


def looked(images: int, patches: int, *cells: list[int]) -> Callable[[], tuple]:
    """Maps of 3 layers and 2 heads, and cells for each image."""
    shape = (images, 2, patches + 1, patches + 1)
    return lambda: ([maps(*shape, seed=seed) for seed in range(3)], *map(torch.tensor, cells))


TOKEN = "A cell's number is not its token's: token 0 is the class token, so cell c is token c + 1."
EXCHANGED = "Row and column are exchanged: p[i, j] is what token i gives to token j."
PATCHES_ONLY = (
    "The rows were rescaled to the patches. What goes to the class token counts as given away, too."
)


EXERCISES = (
    Exercise(
        "A1.1a",
        right=talk(ONE, before=True),
        also_right=(as_matrices,),
        cases={"3 heads": heads(2, 3, 3), "2 heads": heads(3, 2, 2)},
        wrong={
            "The maps are mixed, after the softmax. Mix the scores, before it.": talk(ONE),
            FLIPPED: talk("hg,bhij->bgij", before=True),
            LAYOUT: talk(ONE, before=True, join=heads_over_tokens),
            NO_SCALE: talk(ONE, before=True, scores=unscaled),
        },
    ),
    Exercise(
        "A1.1b",
        right=talk(ONE),
        also_right=(head_by_head,),
        cases={"3 heads make 2": heads(2, 2, 3), "2 heads make 2": heads(3, 2, 2)},
        wrong={
            "The scores are mixed, before the softmax. Mix the maps, after it.": talk(ONE, before=True),
            "The rows were made to sum to 1 again. Heads that talk after the softmax lose that sum.": talk(
                ONE, join=rows_of_one
            ),
            LAYOUT: talk(ONE, join=heads_over_tokens),
            NO_SCALE: talk(ONE, scores=unscaled),
        },
    ),
    Exercise(
        "A1.1c",
        right=talk(EACH),
        also_right=(query_by_query,),
        cases={"3 heads": heads(2, 2, 5, 3, 3), "2 heads": heads(3, 3, 5, 2, 2)},
        wrong={
            "The matrix of the key was taken. It is the query that mixes.": talk("bjgh,bhij->bgij"),
            "The scores are mixed, before the softmax. Mix the maps, after it.": talk(EACH, before=True),
            FLIPPED: talk("bihg,bhij->bgij"),
            LAYOUT: talk(EACH, join=heads_over_tokens),
            NO_SCALE: talk(EACH, scores=unscaled),
        },
    ),
    Exercise(
        "A1.2a",
        right=gradient(sink),
        also_right=(by_vjp(sink),),
        cases={"5 tokens": queries(2, 5, 5), "one query, 7 keys": queries(1, 1, 7)},
        wrong={
            "That is plain attention's: the sink's 1 is forgotten.": gradient(no_sink),
            CONSTANT: gradient(sink, softmax=constant_sum),
            NO_SCALE: gradient(sink, width),
        },
    ),
    Exercise(
        "A1.2b",
        right=gradient(capped),
        also_right=(by_vjp(capped),),
        cases={"5 tokens": queries(2, 5, 5, lambda: 2.0), "one query, 7 keys": queries(1, 1, 7, lambda: 0.5)},
        wrong={
            "The slope of the cap is missing on the way back.": gradient(no_slope),
            CONSTANT: gradient(capped, softmax=constant_sum),
            NO_SCALE: gradient(capped, width),
        },
    ),
    Exercise(
        "A1.2c",
        right=gradient(mixed),
        also_right=(by_vjp(mixed),),
        cases={
            "5 tokens": queries(2, 5, 5, lambda: normal(3, 3, seed=8)),
            "one query, 7 keys": queries(1, 1, 7, lambda: normal(3, 3, seed=9)),
        },
        wrong={
            "The scores' gradients are not mixed: what heads"
            " said to each other counts on the way back, too.": gradient(not_mixed_back),
            "On the way back the matrix is transposed: an old"
            " head collects from all new ones that it spoke to.": gradient(mixed_back_flipped),
            CONSTANT: gradient(mixed, softmax=constant_sum),
            NO_SCALE: gradient(mixed, width),
        },
    ),
    Exercise(
        "A1.3a",
        right=to_the_mark,
        also_right=(to_the_mark_by_loops,),
        cases={"4 patches": looked(3, 4, [0, 3, 2]), "6 patches": looked(2, 6, [1, 4])},
        wrong={TOKEN: one_token_before(to_the_mark), EXCHANGED: from_the_mark, **told(with_itself)},
    ),
    Exercise(
        "A1.3b",
        right=target_to_key,
        also_right=(target_to_key_by_loops,),
        cases={"4 patches": looked(3, 4, [0, 3, 2], [1, 2, 0]), "6 patches": looked(2, 6, [1, 4], [5, 0])},
        wrong={
            TOKEN: one_token_before(target_to_key),
            EXCHANGED: lambda seen, cell, key: target_to_key(seen, key, cell),
            PATCHES_ONLY: of_patches(target_to_key),
        },
    ),
    Exercise(
        "A1.3c",
        right=to_distractors,
        also_right=(to_distractors_by_loops,),
        cases={"4 patches": looked(3, 4, [0, 3, 2], [1, 2, 0]), "6 patches": looked(2, 6, [1, 4], [5, 0])},
        wrong={
            TOKEN: one_token_before(to_distractors),
            EXCHANGED: lambda seen, *cells: to_distractors([p.mT for p in seen], *cells),
            PATCHES_ONLY: of_patches(to_distractors),
        },
    ),
)

check = checker(EXERCISES)
