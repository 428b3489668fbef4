"""Exercises of chapter 02, Two worlds, one question."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

from atbook.exercises.inputs import normal, vit
from atbook.exercises.judging import Exercise, Wrong
from atlib.optim import make_optimizer
from atlib.recipe import Recipe

# --- 2.1 ---


def decayed(model: nn.Module) -> list[str]:
    """The names of the parameters that weight decay pulls towards 0."""
    exempt = model.no_weight_decay()
    return [name for name, p in model.named_parameters() if p.ndim > 1 and name not in exempt]


def by_the_optimiser(model: nn.Module) -> list[str]:
    """The same from the groups of atlib's optimiser."""
    groups = make_optimizer(model, Recipe(weight_decay=0.1)).param_groups
    pulled = {id(p) for group in groups if group["weight_decay"] > 0 for p in group["params"]}
    return [name for name, p in model.named_parameters() if id(p) in pulled]


def all_but_biases(model: nn.Module) -> list[str]:
    """The norms' weights are in your list (and layer scale, where there is some). Pulled to 0, they switch a
    branch off: leave out all with a single axis, not only biases."""
    exempt = model.no_weight_decay()
    names = [name for name, _ in model.named_parameters()]
    return [name for name in names if not name.endswith("bias") and name not in exempt]


def two_axes(model: nn.Module) -> list[str]:
    """The patch embedding is missing. It is a convolution, with four axes, but it mixes inputs like any other
    matrix."""
    return [name for name, p in model.named_parameters() if p.ndim == 2]


def the_others(model: nn.Module) -> list[str]:
    """These are the parameters that decay leaves alone. Return those that it pulls at."""
    pulled = decayed(model)
    return [name for name, _ in model.named_parameters() if name not in pulled]


# --- 2.2 ---


def smoothing_gradient(logits: Tensor, labels: Tensor, eps: float) -> Tensor:
    """Probabilities minus targets, for the mean over images."""
    classes = logits.shape[1]
    targets = (1 - eps) * one_hot(labels, classes) + eps / classes
    return (logits.softmax(-1) - targets) / len(logits)


def by_autograd(logits: Tensor, labels: Tensor, eps: float) -> Tensor:
    """The same by autograd."""
    logits = logits.clone().requires_grad_()
    return torch.autograd.grad(cross_entropy(logits, labels, label_smoothing=eps), logits)[0]


def among_the_others(logits: Tensor, labels: Tensor, eps: float) -> Tensor:
    """You shared ε among the wrong classes only. PyTorch gives ε/C to every class, and the label is one of
    them."""
    classes = logits.shape[1]
    hot = one_hot(labels, classes)
    targets = (1 - eps) * hot + eps / (classes - 1) * (1 - hot)
    return (logits.softmax(-1) - targets) / len(logits)


def more_than_one(logits: Tensor, labels: Tensor, eps: float) -> Tensor:
    """Your targets sum to 1 + ε. What all classes get is taken from the label first: it keeps 1 - ε and gets
    ε/C."""
    classes = logits.shape[1]
    return (logits.softmax(-1) - one_hot(labels, classes) - eps / classes) / len(logits)


def no_softmax(logits: Tensor, labels: Tensor, eps: float) -> Tensor:
    """You took the targets from the logits themselves. Take them from the probabilities, the logits'
    softmax."""
    classes = logits.shape[1]
    targets = (1 - eps) * one_hot(labels, classes) + eps / classes
    return (logits - targets) / len(logits)


# --- 2.3 ---


def match_oracle(hue: Tensor, key: Tensor, heads: int) -> Tensor:
    """The class token reads the glyph in the key's hue."""
    images = torch.arange(len(hue))
    same = hue == hue[images, key][:, None]
    same[images, key] = False
    return to_maps(same, heads)


def to_maps(heard: Tensor, heads: int) -> Tensor:
    """The cells that the class token hears (B, cells), as maps (B, heads, N, N)."""
    p = torch.eye(heard.shape[1] + 1).repeat(len(heard), 1, 1)
    p[:, 0, 0] = 0
    p[:, 0, 1:] = heard / heard.sum(1, keepdim=True)
    return p[:, None].expand(-1, heads, -1, -1)


def image_by_image(hue: Tensor, key: Tensor, heads: int) -> Tensor:
    """The same in loops."""
    p = []
    for hues, k in zip(hue.tolist(), key.tolist()):
        (target,) = [cell for cell, named in enumerate(hues) if named == hues[k] and cell != k]
        heard = [target + 1, *range(1, len(hues) + 1)]  # by the class token, then by each cell's
        p.append(torch.eye(len(hues) + 1)[heard].repeat(heads, 1, 1))
    return torch.stack(p)


def first_of_the_hue(hue: Tensor, key: Tensor, heads: int) -> Tensor:
    """You took the first cell in the key's hue, and where the key comes first, that is the key. Leave its
    cell out before you search."""
    cell = (hue == hue[torch.arange(len(hue)), key][:, None]).int().argmax(1)
    return to_maps(one_hot(cell, hue.shape[1]), heads)


def all_of_the_hue(hue: Tensor, key: Tensor, heads: int) -> Tensor:
    """The class token listens half to the key. Its hue was needed to find the glyph, and you have read it
    already: all of the row belongs to the glyph."""
    return to_maps(hue == hue[torch.arange(len(hue)), key][:, None], heads)


def token_before(hue: Tensor, key: Tensor, heads: int) -> Tensor:
    """The class token listens to the token before the glyph's. Token 0 is the class token, so cell c is token
    c + 1."""
    p = match_oracle(hue, key, heads).clone()
    p[:, :, 0] = p[:, :, 0].roll(-1, dims=-1)
    return p


def row_of_two(hue: Tensor, key: Tensor, heads: int) -> Tensor:
    """The class token's row sums to 2, because it still listens to itself. Rows are shares."""
    p = match_oracle(hue, key, heads).clone()
    p[:, :, 0, 0] = 1
    return p


def scenes(images: int, cells: int, empty: float = 0.0, seed: int = 0) -> tuple[Tensor, Tensor]:
    """The hues of all cells and the keys' cells, as in Match: one glyph has the hue of the key. A share
    `empty` of the other cells is empty."""
    generator = torch.Generator().manual_seed(seed)
    places = torch.rand(images, cells, generator=generator).argsort(1)
    key, target, rows = places[:, 0], places[:, 1], torch.arange(images)
    named = torch.randint(6, (images,), generator=generator)
    hue = (named[:, None] + torch.randint(1, 6, (images, cells), generator=generator)) % 6
    hue[torch.rand(images, cells, generator=generator) < empty] = -1
    hue[rows, key] = hue[rows, target] = named
    return hue, key


EXERCISES = (
    Exercise(
        "2.1",
        "What weight decay must not touch",
        stars=1,
        minutes=10,
        subject="training",
        right=decayed,
        cases={
            "a plain ViT": lambda: (vit(depth=1),),
            "registers and layer scale": lambda: (vit(depth=1, reg_tokens=2, init_values=0.1),),
        },
        also_right=(by_the_optimiser,),
        wrong={
            "positions too": Wrong(
                lambda model: [name for name, p in model.named_parameters() if p.ndim > 1],
                "Positions and the class token are in your list. They have three axes, but they mix no"
                " inputs: leave out what `no_weight_decay()` names.",
            ),
            "by the name bias": Wrong(all_but_biases),
            "two axes": Wrong(two_axes),
            "the others": Wrong(the_others),
        },
        see="The training loop",
        view=sorted,
    ),
    Exercise(
        "2.2",
        "The gradient of label smoothing",
        stars=2,
        minutes=15,
        subject="gradients",
        right=smoothing_gradient,
        cases={
            "6 images, 8 classes": lambda: (normal(6, 8), torch.tensor([0, 3, 3, 7, 1, 5]), 0.1),
            "4 images, 3 classes": lambda: (normal(4, 3, seed=2), torch.tensor([0, 1, 2, 2]), 0.3),
        },
        also_right=(by_autograd,),
        wrong={
            "among the others": Wrong(among_the_others),
            "more than one": Wrong(more_than_one),
            "no mean": Wrong(
                lambda logits, labels, eps: smoothing_gradient(logits, labels, eps) * len(logits),
                "The loss is a mean over images, so each image's gradient is divided by their number.",
            ),
            "sign": Wrong(
                lambda logits, labels, eps: -smoothing_gradient(logits, labels, eps),
                "The sign is turned round. The gradient is probability less target; the step goes against"
                " it.",
            ),
            "no softmax": Wrong(no_softmax),
            "no smoothing": Wrong(
                lambda logits, labels, eps: smoothing_gradient(logits, labels, 0.0),
                "ε is not used: these are the gradients without smoothing.",
            ),
            "ε for 1 - ε": Wrong(
                lambda logits, labels, eps: smoothing_gradient(logits, labels, 1 - eps),
                "ε and 1 - ε are exchanged: the label keeps 1 - ε.",
            ),
        },
        see="The training loop",
    ),
    Exercise(
        "2.3",
        "Two looks, and an oracle for them",
        stars=2,
        minutes=20,
        subject="the built-in world",
        right=match_oracle,
        cases={
            "8 images, the book's grid": lambda: (*scenes(8, 16), 4),
            "6 images of 9 cells, half of them empty": lambda: (*scenes(6, 9, empty=0.5, seed=1), 2),
        },
        also_right=(image_by_image,),
        wrong={
            "the key itself": Wrong(first_of_the_hue),
            "key and glyph": Wrong(all_of_the_hue),
            "one look": Wrong(
                lambda hue, key, heads: to_maps(one_hot(key, hue.shape[1]), heads),
                "The class token listens to the key, which has no shape to name. The second look is missing:"
                " go on to the other cell in the key's hue.",
            ),
            "class token forgotten": Wrong(token_before),
            "a row of two": Wrong(row_of_two),
        },
        see="An oracle",
    ),
)
