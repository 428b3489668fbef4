"""Exercises of chapter 2, A world where looking is hard."""

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor
from torch.nn.functional import one_hot

from atbook.exercises.inputs import maps, normal, vit
from atbook.exercises.judging import Exercise, Wrong
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


# --- 2.2 ---


def share_on_cell(p: Tensor, cell: Tensor) -> Tensor:
    """The class token's share on a cell, by head."""
    return p[torch.arange(len(p)), :, 0, cell + 1].mean(0)


def by_ones(p: Tensor, cell: Tensor) -> Tensor:
    """The same with a row of ones and zeros for each image."""
    on_cell = one_hot(cell + 1, p.shape[-1]).to(p)
    return torch.einsum("bhn,bn->h", p[:, :, 0], on_cell) / len(p)


def every_images_cell(p: Tensor, cell: Tensor) -> Tensor:
    """p[:, :, 0, cell + 1] reads the cells of all images in each image. Each has its own: index the images
    too, with torch.arange."""
    return p[:, :, 0, cell + 1].mean((0, 2))


def among_patches(p: Tensor, cell: Tensor) -> Tensor:
    """You scaled the row up to the patches. What the class token keeps for itself is attention that is not on
    the mark: leave the row as it is."""
    return share_on_cell(p / p[..., 1:].sum(-1, keepdim=True), cell)


# --- 2.3 ---


@torch.no_grad()
def blindfold_head(model: VisionTransformer, images: Tensor, key: Tensor, layer: int, head: int) -> Tensor:
    """Logits when the class token of one head cannot see the key."""
    return put_in(model, images, layer, hidden_in(model, images, key, layer, [head]))


@torch.no_grad()
def by_scores(model: VisionTransformer, images: Tensor, key: Tensor, layer: int, head: int) -> Tensor:
    """The same block by block: a score of -∞ before the softmax hides the key."""
    x = model._pos_embed(model.patch_embed(images))
    for number, block in enumerate(model.blocks):
        (seen,) = walk(block.attn, block.norm1(x)).layers
        scores = seen.scores
        if number == layer:
            scores[torch.arange(len(images)), head, 0, key + 1] = -torch.inf
        x = x + block.attn.proj((scores.softmax(-1) @ seen.v).transpose(1, 2).flatten(2))
        x = x + block.mlp(block.norm2(x))
    return model.head(model.norm(x)[:, 0])


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
def all_heads(model: VisionTransformer, images: Tensor, key: Tensor, layer: int, head: int) -> Tensor:
    """The key is hidden in every head. Change the one that was asked for, and leave the others the maps that
    they have."""
    heads = range(model.blocks[layer].attn.num_heads)
    return put_in(model, images, layer, hidden_in(model, images, key, layer, [*heads]))


@torch.no_grad()
def all_tokens(model: VisionTransformer, images: Tensor, key: Tensor, layer: int, head: int) -> Tensor:
    """The key is hidden from every token. Only the class token wears the blindfold: row 0."""
    p = walk(model, images).layers[layer].map.clone()
    p[torch.arange(len(images)), head, :, key + 1] = 0
    return put_in(model, images, layer, p / p.sum(-1, keepdim=True))


@torch.no_grad()
def not_scaled(model: VisionTransformer, images: Tensor, key: Tensor, layer: int, head: int) -> Tensor:
    """What is left of the row does not sum to 1, so the class token hears less of everything. Divide the row
    by its sum."""
    return put_in(model, images, layer, hidden_in(model, images, key, layer, [head], scaled=False))


@torch.no_grad()
def later_maps_kept(model: VisionTransformer, images: Tensor, key: Tensor, layer: int, head: int) -> Tensor:
    """All other layers got the maps that they had before the blindfold. Then they cannot miss the key:
    replace the map of one layer only, and let the later ones compute theirs."""
    replace = {i: Instead(map=seen.map) for i, seen in enumerate(walk(model, images).layers)}
    replace[layer] = Instead(map=hidden_in(model, images, key, layer, [head]))
    return walk(model, images, replace=replace).logits


EXERCISES = (
    Exercise(
        "2.1",
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
    Exercise(
        "2.2",
        "The share on the mark",
        stars=1,
        minutes=10,
        subject="maps",
        right=share_on_cell,
        cases={
            "5 images, 16 cells": lambda: (maps(5, 4, 17, 17), torch.tensor([0, 3, 7, 14, 9])),
            "3 images, 9 cells": lambda: (maps(3, 2, 10, 10), torch.tensor([8, 0, 4])),
        },
        also_right=(by_ones,),
        wrong={
            "class token forgotten": Wrong(
                lambda p, cell: p[torch.arange(len(p)), :, 0, cell].mean(0),
                "You read the token before the marked one. Token 0 is the class token, so cell c is token"
                " c + 1.",
            ),
            "column": Wrong(
                lambda p, cell: p[torch.arange(len(p)), :, cell + 1, 0].mean(0),
                "That is how much the marked cell listens to the class token. How much the class token"
                " listens is in its row, row 0.",
            ),
            "every image's cell": Wrong(every_images_cell),
            "among patches": Wrong(among_patches),
        },
        see="One number per head",
    ),
    Exercise(
        "2.3",
        "Blindfold one head",
        stars=3,
        minutes=25,
        subject="interventions",
        right=blindfold_head,
        cases={
            "layer 0 of 2": lambda: (vit(0, depth=2), normal(4, 3, 16, 16), torch.tensor([0, 3, 1, 2]), 0, 2),
            "layer 1 of 3": lambda: (vit(1), normal(3, 3, 16, 16, seed=1), torch.tensor([1, 1, 3]), 1, 0),
        },
        also_right=(by_scores,),
        wrong={
            "all heads": Wrong(all_heads),
            "all tokens": Wrong(all_tokens),
            "not scaled": Wrong(not_scaled),
            "class token forgotten": Wrong(
                lambda model, images, key, layer, head: blindfold_head(model, images, key - 1, layer, head),
                "You hid the token before the key's. Token 0 is the class token, so cell c is token c + 1.",
            ),
            "later maps kept": Wrong(later_maps_kept),
        },
        see="The same task in Match",
    ),
)
