"""Exercises of chapter 2, A world where looking is hard."""

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor
from torch.nn.functional import one_hot

from atbook.exercises.inputs import maps, normal, vit
from atbook.exercises.judging import Exercise, told
from atlib import walk
from atlib.attention import Instead

# --- 2.1 ---


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


def token_before(hue, key, heads):
    """The class token listens to the token before the glyph's. Token 0 is the class token, so cell c is token
    c + 1."""
    p = match_oracle(hue, key, heads).clone()
    p[:, :, 0] = p[:, :, 0].roll(-1, dims=-1)
    return p


def row_of_two(hue, key, heads):
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


# --- 2.2 ---


def share_on_cell(p: Tensor, cell: Tensor) -> Tensor:
    """The class token's share on a cell, by head."""
    return p[torch.arange(len(p)), :, 0, cell + 1].mean(0)


def by_ones(p: Tensor, cell: Tensor) -> Tensor:
    """The same with a row of ones and zeros for each image."""
    on_cell = one_hot(cell + 1, p.shape[-1]).to(p)
    return torch.einsum("bhn,bn->h", p[:, :, 0], on_cell) / len(p)


# --- 2.3 ---


@torch.no_grad()
def blindfold_head(model: VisionTransformer, images: Tensor, key: Tensor, layer: int, head: int) -> Tensor:
    """Logits when the class token of one head cannot see the key."""
    return put_in(model, images, layer, hidden_in(model, images, key, layer, [head]))


def hidden_in(
    model: VisionTransformer, images: Tensor, key: Tensor, layer: int, heads: list[int], scaled: bool = True
) -> Tensor:
    """The layer's maps, without the class token's share on the key in some heads."""
    p = walk(model, images).layers[layer].map.clone()
    for head in heads:
        p[torch.arange(len(images)), head, 0, key + 1] = 0
    return p / p.sum(-1, keepdim=True) if scaled else p


def put_in(model: VisionTransformer, images: Tensor, layer: int, p: Tensor) -> Tensor:
    """Logits with other maps in one layer."""
    return walk(model, images, replace={layer: Instead(map=p)}).logits


@torch.no_grad()
def all_heads(model, images, key, layer, head):
    """The key is hidden in every head. Change the one that was asked for, and leave the others the maps that
    they have."""
    heads = range(model.blocks[layer].attn.num_heads)
    return put_in(model, images, layer, hidden_in(model, images, key, layer, [*heads]))


@torch.no_grad()
def all_tokens(model, images, key, layer, head):
    """The key is hidden from every token. Only the class token wears the blindfold: row 0."""
    p = walk(model, images).layers[layer].map.clone()
    p[torch.arange(len(images)), head, :, key + 1] = 0
    return put_in(model, images, layer, p / p.sum(-1, keepdim=True))


@torch.no_grad()
def later_maps_kept(model, images, key, layer, head):
    """All other layers got the maps that they had before the blindfold. Then they cannot miss the key:
    replace the map of one layer only, and let the later ones compute theirs."""
    replace = {i: Instead(map=seen.map) for i, seen in enumerate(walk(model, images).layers)}
    replace[layer] = Instead(map=hidden_in(model, images, key, layer, [head]))
    return walk(model, images, replace=replace).logits


EXERCISES = (
    Exercise(
        "2.1",
        subject="the built-in world",
        right=match_oracle,
        cases={
            "8 images, the book's grid": lambda: (*scenes(8, 16), 4),
            "6 images of 9 cells, half of them empty": lambda: (*scenes(6, 9, empty=0.5, seed=1), 2),
        },
        wrong={
            "The class token listens half to the key. Its hue was needed to find the glyph,"
            " and you have read it already: all of the row belongs to the glyph.": lambda hue, key, heads: (
                to_maps(hue == hue[torch.arange(len(hue)), key][:, None], heads)
            ),
            "The class token listens to the key, which has no shape"
            " to name. The second look is missing: go on to the other"
            " cell in the key's hue.": lambda hue, key, heads: to_maps(one_hot(key, hue.shape[1]), heads),
            "You took the first cell in the key's hue, and where the key comes"
            " first, that is the key. Leave its cell out before you search.": lambda hue, key, heads: to_maps(
                one_hot((hue == hue[torch.arange(len(hue)), key][:, None]).int().argmax(1), hue.shape[1]),
                heads,
            ),
            **told(token_before, row_of_two),
        },
        see="An oracle",
    ),
    Exercise(
        "2.2",
        subject="maps",
        right=share_on_cell,
        cases={
            "5 images, 16 cells": lambda: (maps(5, 4, 17, 17), torch.tensor([0, 3, 7, 14, 9])),
            "3 images, 9 cells": lambda: (maps(3, 2, 10, 10), torch.tensor([8, 0, 4])),
        },
        also_right=(by_ones,),
        wrong={
            "You read the token before the marked one. Token 0 is the class"
            " token, so cell c is token c + 1.": lambda p, cell: p[torch.arange(len(p)), :, 0, cell].mean(0),
            "That is how much the marked cell listens to the class token. How much the class token"
            " listens is in its row, row 0.": lambda p, cell: p[torch.arange(len(p)), :, cell + 1, 0].mean(0),
            "p[:, :, 0, cell + 1] reads the cells of all images in each image. Each has its own:"
            " index the images too, with torch.arange.": lambda p, cell: p[:, :, 0, cell + 1].mean((0, 2)),
            "You scaled the row up to the patches. What the class token"
            " keeps for itself is attention that is not on the mark: leave"
            " the row as it is.": lambda p, cell: share_on_cell(p / p[..., 1:].sum(-1, keepdim=True), cell),
        },
        see="One number per head",
    ),
    Exercise(
        "2.3",
        subject="interventions",
        right=blindfold_head,
        cases={
            "layer 0 of 2": lambda: (vit(0, depth=2), normal(4, 3, 16, 16), torch.tensor([0, 3, 1, 2]), 0, 2),
            "layer 1 of 3": lambda: (vit(1), normal(3, 3, 16, 16, seed=1), torch.tensor([1, 1, 3]), 1, 0),
        },
        wrong={
            "What is left of the row does not sum to 1, so the class token hears"
            " less of everything. Divide the row by its sum.": lambda model, images, key, layer, head: put_in(
                model, images, layer, hidden_in(model, images, key, layer, [head], scaled=False)
            ),
            "You hid the token before the key's. Token 0"
            " is the class token, so cell c is token c + 1.": lambda model, images, key, layer, head: (
                blindfold_head(model, images, key - 1, layer, head)
            ),
            **told(all_heads, all_tokens, later_maps_kept),
        },
        see="The same task in Match",
    ),
)
