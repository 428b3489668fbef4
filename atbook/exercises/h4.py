"""Exercises of how-to H4, The training loop."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

from atbook.exercises.inputs import normal, vit
from atbook.exercises.judging import Exercise, told
from atlib.recipe import Recipe
from atlib.train import make_optimizer

# --- H4.1 ---


def decayed(model: nn.Module) -> list[str]:
    """The names of the parameters that weight decay pulls towards 0."""
    exempt = model.no_weight_decay()
    return [name for name, p in model.named_parameters() if p.ndim > 1 and name not in exempt]


def by_the_optimiser(model: nn.Module) -> list[str]:
    """The same from the groups of atlib's optimiser."""
    groups = make_optimizer(model, Recipe(weight_decay=0.1)).param_groups
    pulled = {id(p) for group in groups if group["weight_decay"] > 0 for p in group["params"]}
    return [name for name, p in model.named_parameters() if id(p) in pulled]


def all_but_biases(model):
    """The norms' weights are in your list (and layer scale, where there is some). Pulled to 0, they switch a
    branch off: leave out all with a single axis, not only biases."""
    exempt = model.no_weight_decay()
    names = [name for name, _ in model.named_parameters()]
    return [name for name in names if not name.endswith("bias") and name not in exempt]


# --- H4.2 ---


def smoothing_gradient(logits: Tensor, labels: Tensor, eps: float) -> Tensor:
    """Probabilities minus targets, for the mean over images."""
    classes = logits.shape[1]
    targets = (1 - eps) * one_hot(labels, classes) + eps / classes
    return (logits.softmax(-1) - targets) / len(logits)


def by_autograd(logits: Tensor, labels: Tensor, eps: float) -> Tensor:
    """The same by autograd."""
    logits = logits.clone().requires_grad_()
    return torch.autograd.grad(cross_entropy(logits, labels, label_smoothing=eps), logits)[0]


def among_the_others(logits, labels, eps):
    """You shared ε among the wrong classes only. PyTorch gives ε/C to every class, and the label is one of
    them."""
    classes = logits.shape[1]
    hot = one_hot(labels, classes)
    targets = (1 - eps) * hot + eps / (classes - 1) * (1 - hot)
    return (logits.softmax(-1) - targets) / len(logits)


def no_softmax(logits, labels, eps):
    """You took the targets from the logits themselves. Take them from the probabilities, the logits'
    softmax."""
    classes = logits.shape[1]
    targets = (1 - eps) * one_hot(labels, classes) + eps / classes
    return (logits - targets) / len(logits)


EXERCISES = (
    Exercise(
        "H4.1",
        subject="training",
        right=decayed,
        cases={
            "a plain ViT": lambda: (vit(depth=1),),
            "registers and layer scale": lambda: (vit(depth=1, reg_tokens=2, init_values=0.1),),
        },
        also_right=(by_the_optimiser,),
        wrong={
            "Positions and the class token are in your list. They have three"
            " axes, but they mix no inputs: leave out what `no_weight_decay()`"
            " names.": lambda model: [name for name, p in model.named_parameters() if p.ndim > 1],
            "The patch embedding is missing. It is a convolution, with four axes, but it mixes inputs like"
            " any other matrix.": lambda model: [name for name, p in model.named_parameters() if p.ndim == 2],
            "These are the parameters that decay leaves"
            " alone. Return those that it pulls at.": lambda model: (
                [name for name, _ in model.named_parameters() if name not in decayed(model)]
            ),
            **told(all_but_biases),
        },
        see="The training loop",
        view=sorted,
    ),
    Exercise(
        "H4.2",
        subject="gradients",
        right=smoothing_gradient,
        cases={
            "6 images, 8 classes": lambda: (normal(6, 8), torch.tensor([0, 3, 3, 7, 1, 5]), 0.1),
            "4 images, 3 classes": lambda: (normal(4, 3, seed=2), torch.tensor([0, 1, 2, 2]), 0.3),
        },
        also_right=(by_autograd,),
        wrong={
            "The loss is a mean over images, so each image's gradient is divided by their"
            " number.": lambda logits, labels, eps: smoothing_gradient(logits, labels, eps) * len(logits),
            "The sign is turned round. The gradient is probability less target; the"
            " step goes against it.": lambda logits, labels, eps: -smoothing_gradient(logits, labels, eps),
            "ε is not used: these are the gradients without smoothing.": lambda logits, labels, eps: (
                smoothing_gradient(logits, labels, 0.0)
            ),
            "ε and 1 - ε are exchanged: the label keeps 1 - ε.": lambda logits, labels, eps: (
                smoothing_gradient(logits, labels, 1 - eps)
            ),
            "Your targets sum to 1 + ε. What all classes get is taken"
            " from the label first: it keeps 1 - ε and gets ε/C.": lambda logits, labels, eps: (
                (logits.softmax(-1) - one_hot(labels, logits.shape[1]) - eps / logits.shape[1]) / len(logits)
            ),
            **told(among_the_others, no_softmax),
        },
        see="The training loop",
    ),
)
