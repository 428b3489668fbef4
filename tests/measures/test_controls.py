"""Controls of attention transfer: what each changes of the maps, and the table that they make."""

import math

import pytest
import torch
from scipy import stats

from atbook.worlds import glyph_images, glyphs
from atfamily.measures.controls import (
    Control,
    controls,
    controls_table,
    jigsaw,
    maps_of,
    patch_order,
    switched,
)
from atlib import AttentionTransfer, Plan, walk
from atlib.attention import Instead
from atlib.data import pair
from atlib.loading import seed_for
from atlib.recipe import Recipe
from atlib.train import train
from tests.helpers import random_images, randomise, tiny

IMAGES = random_images(5, 3, 32, 32)


def glyphs_of(split, size, twin=None):
    return glyph_images(glyphs.generate(split, size, 0, twin=twin))


@pytest.fixture(scope="module")
def taught():
    """A pair of Copy whose maps matter."""
    teacher, student = randomise(tiny(1, num_classes=0)), randomise(tiny(2), seed=2)
    return AttentionTransfer(teacher, student, Plan()).eval()


def test_a_jigsaw_is_the_map_of_moved_tokens():
    """As a walk through the blocks with the tokens in that order, since attention knows no places."""
    vit, order = randomise(tiny()).eval(), patch_order(16, 1, seed=0)
    given = maps_of(vit)(IMAGES)
    moved = jigsaw(maps_of(vit), order)(IMAGES)
    tokens = vit._pos_embed(vit.patch_embed(IMAGES))[:, order]
    for layer, block in enumerate(vit.blocks):
        heads, width = block.attn.num_heads, block.attn.head_dim
        parts = block.attn.qkv(block.norm1(tokens)).chunk(3, -1)[:2]
        q, k = (part.unflatten(-1, (heads, width)).transpose(1, 2) for part in parts)
        expected = (q @ k.mT / math.sqrt(width)).softmax(-1)
        torch.testing.assert_close(moved[layer], expected, atol=1e-5, rtol=0)
        assert (moved[layer] - given[layer]).abs().max() > 0.05
        tokens = block(tokens)


def test_what_a_trained_student_makes_of_other_maps(taught):
    held_out, teacher, student = glyphs_of("test", 40), taught.teacher, taught.student
    rows = {row.name: row for row in switched(taught, held_out, held_out, batch_size=16)}
    images, labels = held_out.take(range(40))
    given = maps_of(teacher)(images)

    def answers(images, maps):
        with torch.no_grad():
            walked = walk(student, images, replace={i: Instead(map=p) for i, p in maps.items()})
            return walked.logits.argmax(1)

    order = patch_order(16, 1, seed_for(0, "twins"))
    expected = {
        "own maps": answers(images, given) == labels,
        "jigsaw": answers(images, {i: p[:, :, order][..., order] for i, p in given.items()}) == labels,
        "mean map": answers(images, {i: p.mean(0, keepdim=True).expand_as(p) for i, p in given.items()})
        == labels,
        "blank": answers(torch.zeros_like(images), given) == labels,
    }
    others = [next(j % 40 for j in range(i + 1, i + 41) if labels[j % 40] != labels[i]) for i in range(40)]
    crossed = answers(images, {i: p[others] for i, p in given.items()})
    expected["another class"] = crossed == labels
    expected["another class, says that class"] = crossed == labels[others]
    assert rows.keys() == expected.keys()
    for name, right in expected.items():
        assert torch.equal(rows[name].right[0], right), name


def test_a_smaller_student_with_aggregated_heads_and_mapped_layers():
    """As `transfer` derives it; heads are merged here by what AttnDistill says, not by the library."""
    teacher = randomise(tiny(1, depth=4, embed_dim=32, num_heads=4, num_classes=0)).eval()
    student, held_out = randomise(tiny(2), seed=2).eval(), glyphs_of("test", 40)
    layers, unequal = {0: 1, 1: 3}, {"unequal_heads": "aggregate"}
    copying = AttentionTransfer(teacher, student, Plan(layers=layers, **unequal))
    rows = {row.name: row.right[0] for row in switched(copying, held_out, held_out)}
    images, labels = held_out.take(range(40))
    given, order = maps_of(teacher)(images), patch_order(16, 1, seed_for(0, "twins"))
    for name, change in {
        "own maps": lambda p: p,
        "jigsaw": lambda p: p[:, :, order][..., order],
        "mean map": lambda p: p.mean(0, keepdim=True).expand_as(p),
    }.items():
        sums = {i: change(given[j]).double().log().sum(1, keepdim=True) for i, j in layers.items()}
        maps = {i: (x / 10).softmax(-1).float().expand(-1, 2, -1, -1) for i, x in sums.items()}
        instead = {i: Instead(map=p) for i, p in maps.items()}
        with torch.no_grad():
            expected = walk(student, images, replace=instead).logits.argmax(1) == labels
        assert torch.equal(rows[name], expected), name


def test_a_student_is_trained_under_each_control(taught):
    images, held_out = glyphs_of("train", 24), glyphs_of("test", 30)
    recipe = Recipe(steps=3, batch_size=8)

    def fresh():
        return tiny(seed=int(torch.initial_seed() % 2**31))

    def oracle(seen):
        return dict.fromkeys(range(2), torch.eye(17).expand(len(seen), 2, 17, 17))

    options = {"twins": {"the image itself": lambda some: pair(some, some)}, "seeds": 2, "progress": False}
    rows = controls(taught.teacher, fresh, images, held_out, recipe, oracle=oracle, **options)
    names = ["scratch", "own maps", "jigsaw", "mean map", "blank", "oracle", "the image itself"]
    assert [row.name for row in rows] == names
    assert {tuple(row.right.shape) for row in rows} == {(2, 30)} and {row.lr for row in rows} == {recipe.lr}
    of = {row.name: row.right for row in rows}
    assert torch.equal(of["own maps"], of["the image itself"])

    # the first row is plain training

    torch.manual_seed(seed_for(1, "student"))
    student = fresh()
    train(student, images, recipe, seed=seed_for(1, "order"), progress=None)
    inputs, labels = held_out.take(range(30))
    with torch.no_grad():
        assert torch.equal(of["scratch"][1], student.eval()(inputs).argmax(1) == labels)


def test_each_row_takes_the_rate_that_is_best_on_validation_images(taught):
    images, validation, held_out = map(glyphs_of, ("train", "validation", "test"), (16, 20, 10))
    options = {"rates": (1e-9, 1e-8), "plan": Plan(how="distill"), "seeds": 1, "progress": False}
    recipe = Recipe(steps=1, batch_size=8)
    rows = controls(taught.teacher, tiny, images, held_out, recipe, validation=validation, **options)
    assert [row.name for row in rows] == ["scratch", "own maps", "jigsaw", "mean map"], "no blank for Distill"
    assert {row.lr for row in rows} <= {1e-9, 1e-8}


def test_the_table_has_intervals_over_seeds_and_the_share_of_the_gain():
    generator = torch.Generator().manual_seed(0)
    shares = {"scratch": 0.3, "own maps": 0.8, "jigsaw": 0.5}
    rows = [Control(name, torch.rand(3, 200, generator=generator) < x) for name, x in shares.items()]
    apart = [100 * (rows[2].right[s].double() - rows[1].right[s].double()).mean().item() for s in range(3)]
    mean = sum(apart) / 3
    deviation = math.sqrt(sum((value - mean) ** 2 for value in apart) / 2)
    reach = stats.t.ppf(0.975, 2) * deviation / math.sqrt(3)
    last = controls_table(rows).splitlines()[-1].replace("−", "-")
    assert last.startswith(f"| jigsaw | {100 * rows[2].accuracy:.1f} | {mean:+.1f} [{mean - reach:+.1f}, ")
    scratch, copied = rows[0].accuracy, rows[1].accuracy
    assert last.endswith(f" {100 * (rows[2].accuracy - scratch) / (copied - scratch):.0f} % |")
    assert controls_table(rows).splitlines()[3].count("|") == 5
    assert "–" in controls_table(rows[1:]), "without scratch no gain is known"
