"""Exercises of chapter 03, Making a teacher."""

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor
from torch.nn.functional import one_hot

from atbook.exercises.inputs import maps, normal, vit
from atbook.exercises.judging import Exercise, Wrong
from atlib import walk
from atlib.attention import Instead

# --- 3.1 ---


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


# --- 3.2 ---


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
        "3.1",
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
        "3.2",
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
