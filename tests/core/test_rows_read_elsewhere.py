"""Projections whose rows are read by more than their layer's attention: nothing of them may be left out."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from atlib import AttentionTransfer, Plan
from atlib.attention import Instead, find_projections, walk
from tests.helpers import random_images

KINDS = {  # which of q, k and v are one, and what else reads them
    "plain": "qkv",
    "keys are values": "qkk",
    "queries are keys": "qqv",
    "all are one": "qqq",
    "gated by queries": "qkv",
    "values are mixed once more": "qkv",
    "keys go to the next layer": "qkv",
    "queries refuse NaN": "qkv",
}


class Block(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.norm = kind, nn.LayerNorm(24)
        self.projections = nn.ModuleDict({name: nn.Linear(24, 24) for name in KINDS[kind]})
        self.out = nn.Linear(24, 24)

    def forward(self, x, before):
        made = {name: layer(self.norm(x)) for name, layer in self.projections.items()}
        q, k, v = (made[name].unflatten(-1, (3, 8)).transpose(1, 2) for name in KINDS[self.kind])
        key = before if self.kind == "keys go to the next layer" and before is not None else k
        if self.kind == "queries refuse NaN":
            assert q.isfinite().all()
        y = F.scaled_dot_product_attention(q, key, v)
        if self.kind == "gated by queries":
            y = y * torch.sigmoid(4 * q)
        if self.kind == "values are mixed once more":
            y = y + v.roll(1, 2)
        return x + self.out(y.transpose(1, 2).flatten(2)), k


class Net(nn.Module):
    image_size = (16, 16)

    def __init__(self, kind="plain"):
        super().__init__()
        self.patches = nn.Conv2d(3, 24, 4, 4)
        self.blocks, self.head = nn.ModuleList(Block(kind) for _ in range(2)), nn.Linear(24, 5)

    def forward(self, images):
        x, k = self.patches(images).flatten(2).mT, None
        for block in self.blocks:
            x, k = block(x, k)
        return self.head(x.mean(1))


@pytest.mark.parametrize("kind", KINDS)
def test_copy_and_distill_are_what_a_walk_without_projections_is(kind):
    images = random_images(3, 3, 16, 16, dtype=torch.float64)
    teacher, student = Net().double(), Net(kind).double()
    seen = walk(teacher, images).layers
    parts = [{"map": {"map": x.map}} | {name: {name: getattr(x, name)} for name in "qkv"} for x in seen]
    for what in ("map", *"qkv"):
        pair = AttentionTransfer(teacher, student, Plan(what=what, how="copy", mismatched=True)).eval()
        expected = walk(student, images, replace={i: Instead(**p[what]) for i, p in enumerate(parts)}).logits
        torch.testing.assert_close(pair(images).logits, expected)
    taught_by = AttentionTransfer(student, Net().double(), Plan(mismatched=True, how="distill"))
    for found, layer in zip(taught_by.teacher_layers(images), walk(student, images).layers):
        torch.testing.assert_close(found.map, layer.map)


def test_only_rows_that_nothing_else_reads_are_left_out():
    left_out = {kind: find_projections(Net(kind), random_images(1, 3, 16, 16))[1] for kind in KINDS}
    assert [kind for kind, rows in left_out.items() if rows is None] == list(KINDS)[4:]
    assert [len(rows[1]) for rows in left_out.values() if rows is not None] == [3, 1, 1, 0]


def test_attention_that_is_switched_to_the_call_is_so_in_the_second_look_too(small_vit):
    vit, images = small_vit(), random_images(1, 3, 32, 32)
    for block in vit.blocks:
        block.attn.fused_attn = False
    assert [sorted(of_layer) for of_layer in find_projections(vit, images)[1]] == [["k", "q", "v"]] * 3
