"""Exercises of chapter 8, Is it just distillation?."""

import torch
import torch.nn.functional as F
from torch import Tensor

from atbook.exercises.inputs import normal
from atbook.exercises.judging import Exercise, told
from atlib.baselines import hard_distillation, soft_distillation

# --- 8.1 ---


def single_target(z_t: Tensor, labels: Tensor) -> Tensor:
    """Half for the label, half for the teacher's top class: (B, C)."""
    classes = z_t.shape[-1]
    return (F.one_hot(labels, classes) + F.one_hot(z_t.argmax(-1), classes)) / 2


def read_off_the_gradient(z_t: Tensor, labels: Tensor) -> Tensor:
    """The same, because the gradient of a cross-entropy by the logits is (probabilities - target) / B."""
    z_s = torch.zeros_like(z_t, requires_grad=True)
    loss = F.cross_entropy(z_s, labels) / 2 + hard_distillation(z_s, z_t) / 2
    (grad,) = torch.autograd.grad(loss, z_s)
    return z_s.detach().softmax(-1) - len(z_t) * grad


def written_over(z_t, labels):
    """Where the teacher is right, one half is written over the other and the row sums to 1/2. Both halves
    fall on the same class there: add them, and the label has it all."""
    target, images = torch.zeros_like(z_t), torch.arange(len(z_t))
    target[images, labels] = 0.5
    target[images, z_t.argmax(-1)] = 0.5
    return target


# --- 8.2 ---


def soft_gradient(z_s: Tensor, z_t: Tensor, tau: float) -> Tensor:
    """The gradient of τ² KL(teacher || student), mean over images, by the student's logits."""
    return tau * ((z_s / tau).softmax(-1) - (z_t / tau).softmax(-1)) / len(z_s)


def by_autograd(z_s: Tensor, z_t: Tensor, tau: float) -> Tensor:
    """The same, by autograd."""
    z_s = z_s.clone().requires_grad_()
    return torch.autograd.grad(soft_distillation(z_s, z_t, tau), z_s)[0]


def of_reverse(z_s, z_t, tau):
    """That is the gradient of KL(student ‖ teacher). In DeiT's formula the teacher's probability weighs the
    logarithm, and what is left is simpler."""
    log_s, log_t = (z_s / tau).log_softmax(-1), (z_t / tau).log_softmax(-1)
    ratio = log_s - log_t
    return tau * log_s.exp() * (ratio - (log_s.exp() * ratio).sum(-1, keepdim=True)) / len(z_s)


# --- 8.3 ---

Block = dict[str, Tensor]
READ = ("qkv.weight", "fc1.weight")  # they read from the stream


def renamed(block: Block, order: Tensor, hidden: Tensor) -> Block:
    """The block after a reordering of the stream's channels by `order`, and of its MLP's hidden units by
    `hidden`."""
    new = {}
    for name, w in block.items():
        if name.endswith(READ):
            w = w[:, order]
        elif name not in ("attn.qkv.bias", "mlp.fc1.bias"):
            w = w[order]
        if name.startswith("mlp.fc1"):
            w = w[hidden]
        if name == "mlp.fc2.weight":
            w = w[:, hidden]
        new[name] = w
    return new


def read_by_the_inverse(block, order, hidden):
    """The columns of qkv and fc1 have the inverse order. The new channel j is the old order[j] for a matrix
    that reads it, too: w[:, order]."""
    new, inverse = renamed(block, order, hidden), order.argsort()
    qkv, fc1 = block["attn.qkv.weight"][:, inverse], block["mlp.fc1.weight"][hidden][:, inverse]
    return new | {"attn.qkv.weight": qkv, "mlp.fc1.weight": fc1}


def rows_of_qkv(block, order, hidden):
    """The rows of qkv moved as well. They are channels inside of heads, drawers of a different chest: moving
    them changes queries, keys and maps."""
    new = renamed(block, order, hidden)
    for name in ("attn.qkv.weight", "attn.qkv.bias"):
        new[name] = torch.cat([part[order] for part in new[name].chunk(3)])
    return new


def nothing_written(block, order, hidden):
    """What attention and MLP *write* to the stream is in the old order: the rows and the biases of proj and
    fc2."""
    new = renamed(block, order, hidden)
    proj = {name: block[name] for name in ("attn.proj.weight", "attn.proj.bias", "mlp.fc2.bias")}
    return new | proj | {"mlp.fc2.weight": block["mlp.fc2.weight"][:, hidden]}


def random_block(width: int, hidden: int, seed: int = 0) -> Block:
    """The weights of a block, by timm's names."""
    shapes = {
        "norm1.weight": (width,),
        "norm1.bias": (width,),
        "attn.qkv.weight": (3 * width, width),
        "attn.qkv.bias": (3 * width,),
        "attn.proj.weight": (width, width),
        "attn.proj.bias": (width,),
        "norm2.weight": (width,),
        "norm2.bias": (width,),
        "mlp.fc1.weight": (hidden, width),
        "mlp.fc1.bias": (hidden,),
        "mlp.fc2.weight": (width, hidden),
        "mlp.fc2.bias": (width,),
    }
    return {name: normal(*shape, seed=seed + i) for i, (name, shape) in enumerate(shapes.items())}


EXERCISES = (
    Exercise(
        "8.1",
        subject="losses",
        right=single_target,
        cases={
            "right on some images": lambda: (2 * normal(6, 4), torch.tensor([0, 1, 2, 3, 1, 2])),
            "right on all": lambda: ((logits := normal(5, 3, seed=1)), logits.argmax(-1)),
        },
        also_right=(read_off_the_gradient,),
        wrong={
            "You took the teacher's probabilities, as soft distillation does. The hard one knows its"
            " top class alone.": lambda z_t, labels: (F.one_hot(labels, z_t.shape[-1]) + z_t.softmax(-1)) / 2,
            "Only the teacher's class is left. Half of the loss is the cross-entropy"
            " with the label.": lambda z_t, labels: F.one_hot(z_t.argmax(-1), z_t.shape[-1]).double(),
            "Only the label is left. That is so where the teacher's top class"
            " is the label, on the images of its own training; on others"
            " it adds an answer of its own.": lambda z_t, labels: F.one_hot(labels, z_t.shape[-1]).double(),
            "Rows sum to 2: each of the two cross-entropies counts one half.": lambda z_t, labels: (
                2 * single_target(z_t, labels)
            ),
            **told(written_over),
        },
        see="Predictions, by hand",
    ),
    Exercise(
        "8.2",
        subject="gradients",
        right=soft_gradient,
        cases={
            "τ = 3": lambda: (normal(4, 6), 2 * normal(4, 6, seed=1), 3.0),
            "τ = 1": lambda: (normal(3, 5, seed=2), normal(3, 5, seed=3), 1.0),
            "τ = 10": lambda: (normal(2, 5, seed=4), normal(2, 5, seed=5), 10.0),
        },
        also_right=(by_autograd,),
        wrong={
            "The factor τ² of the loss is missing: what is left shrinks about as 1/τ², and at a"
            " high τ the teacher hardly pulls.": lambda z_s, z_t, tau: soft_gradient(z_s, z_t, tau) / tau**2,
            "τ² of the loss meets the 1/τ that comes from differentiating"
            " z/τ: one τ is left, not two.": lambda z_s, z_t, tau: soft_gradient(z_s, z_t, tau) * tau,
            "The probabilities are those at τ = 1. Both sides are softened:"
            " softmax(z/τ).": lambda z_s, z_t, tau: tau * (z_s.softmax(-1) - z_t.softmax(-1)) / len(z_s),
            "The sign is turned: a loss falls *against* its"
            " gradient, and where the student gives a class more"
            " than the teacher does, its logit has to come down.": lambda *inputs: -soft_gradient(*inputs),
            "The loss is a mean over images, so each image's"
            " gradient is divided by B.": lambda z_s, z_t, tau: soft_gradient(z_s, z_t, tau) * len(z_s),
            **told(of_reverse),
        },
        see="Predictions, by hand",
    ),
    Exercise(
        "8.3",
        subject="weights",
        right=renamed,
        cases={
            "6 channels, 8 hidden units": lambda: (
                random_block(6, 8),
                torch.tensor([3, 0, 5, 1, 2, 4]),
                torch.tensor([1, 2, 3, 7, 0, 4, 5, 6]),
            ),
            "as many hidden units as channels": lambda: (
                random_block(4, 4, seed=20),
                torch.tensor([1, 2, 3, 0]),
                torch.tensor([2, 0, 1, 3]),
            ),
        },
        wrong={
            "The hidden units moved and fc1's bias did not:"
            " every unit now has the threshold of another unit.": lambda block, order, hidden: (
                renamed(block, order, hidden) | {"mlp.fc1.bias": block["mlp.fc1.bias"]}
            ),
            "fc1 makes the hidden units in the new order, fc2"
            " reads them in the old one: its columns move along.": lambda block, order, hidden: (
                renamed(block, order, hidden) | {"mlp.fc2.weight": block["mlp.fc2.weight"][order]}
            ),
            "Weights and biases of the norms stayed in the old"
            " order. They are one number a channel and move with it.": lambda block, *order: (
                renamed(block, *order) | {name: w for name, w in block.items() if name.startswith("norm")}
            ),
            "The columns of proj moved as well. It reads the heads' outputs,"
            " which stayed; only its rows are the stream's channels.": lambda block, order, hidden: (
                renamed(block, order, hidden)
                | {"attn.proj.weight": renamed(block, order, hidden)["attn.proj.weight"][:, order]}
            ),
            **told(read_by_the_inverse, rows_of_qkv, nothing_written),
        },
        see="The drawers relabelled",
    ),
)
