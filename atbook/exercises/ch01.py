"""Exercises of chapter 1, What a map does."""

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from atbook.exercises.judging import Exercise, told

# --- 1.1 ---


def only_patch(patch: int, layer: int, depth: int, tokens: int) -> list[Tensor]:
    """Identities, but in one layer the class token listens to one patch."""
    layers = [torch.eye(tokens) for _ in range(depth)]
    layers[layer][0, 0] = 0
    layers[layer][0, patch + 1] = 1
    return layers


def by_listening(patch: int, layer: int, depth: int, tokens: int) -> list[Tensor]:
    """The same from a list of the tokens that each token listens to."""
    heard = torch.arange(tokens).repeat(depth, 1)
    heard[layer, 0] = patch + 1
    return [*one_hot(heard, tokens).double()]


def row_and_column(patch, layer, depth, tokens):
    """Here the patch listens to the class token. Row i says where token i listens, so it is row 0 that has to
    change."""
    layers = [torch.eye(tokens) for _ in range(depth)]
    layers[layer][patch + 1] = 0
    layers[layer][patch + 1, 0] = 1
    return layers


def row_of_two(patch, layer, depth, tokens):
    """The class token's row sums to 2, because it still listens to itself. Rows are shares."""
    layers = [torch.eye(tokens) for _ in range(depth)]
    layers[layer][0, patch + 1] = 1
    return layers


def everybody_listens(patch, layer, depth, tokens):
    """All tokens listen to the patch, so it speaks to every other patch too. Only the class token's row
    changes."""
    layers = [torch.eye(tokens) for _ in range(depth)]
    layers[layer] = torch.zeros(tokens, tokens)
    layers[layer][:, patch + 1] = 1
    return layers


EXERCISES = (
    Exercise(
        "1.1",
        subject="maps",
        right=only_patch,
        cases={
            "patch 5, layer 1 of 4": lambda: (5, 1, 4, 17),
            "patch 0, layer 2 of 3": lambda: (0, 2, 3, 10),
        },
        also_right=(by_listening,),
        wrong={
            "The class token listens to the token with the patch's"
            " number. Token 0 is the class token, so patch p is"
            " token p + 1.": lambda patch, layer, depth, tokens: only_patch(patch - 1, layer, depth, tokens),
            "The class token listens to the patch in every layer. In all layers but one it has to"
            " listen to itself.": lambda patch, layer, depth, tokens: depth * only_patch(patch, 0, 1, tokens),
            **told(row_and_column, row_of_two, everybody_listens),
        },
        see="Experiment 2: which token can influence which?",
        view=lambda layers: torch.stack(tuple(layers)),
    ),
)
