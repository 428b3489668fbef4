"""Every mode against the same step from plain matrices, in float64: logits, loss and all gradients."""

import copy
import dataclasses
import pickle

import pytest
import torch
from torch.nn.functional import cross_entropy

from atlib import AttentionTransfer, Plan
from atlib.plan import OF_MAPS
from tests import longhand
from tests.helpers import mine, random_images

LABELS = torch.tensor([0, 3, 1])
LAMBDA = 3.0
MODES = [(what, how) for how in ("copy", "distill") for what in ("map", "q", "k", "v")]
all_modes = pytest.mark.parametrize("what, how", MODES, ids=lambda value: value)
CLASS_TOKEN, AVERAGE = {}, {"global_pool": "avg", "class_token": False}


def pair_of(small_vit, plan, teacher=None, dtype=torch.float64, **options):
    teacher = small_vit(seed=1, **(options | (teacher or {})))
    return AttentionTransfer(teacher, small_vit(seed=2, **options), plan).to(dtype).train()


def images_of(dtype=torch.float64):
    return random_images(3, 3, 32, 32, dtype=dtype)


def measured(pair, images):
    """Logits, transfer loss, and the gradients of task loss + λ · transfer loss, zero where there is none."""
    pair.zero_grad()
    output = pair(images)
    (cross_entropy(output.logits, LABELS) + LAMBDA * output.transfer_loss).backward()
    found = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in pair.student.named_parameters()}
    return {"logits": output.logits.detach(), "loss": output.transfer_loss.detach()} | found


def leaves(pair):
    """The student's weights, for the long-hand implementation."""
    return {name: value.clone().requires_grad_() for name, value in pair.student.state_dict().items()}


def stepped(weights, logits, loss):
    """The same three of the long-hand implementation."""
    (longhand.cross_entropy(logits, LABELS) + LAMBDA * loss).backward()
    gradients = {name: torch.zeros_like(w) if w.grad is None else w.grad for name, w in weights.items()}
    return {"logits": logits.detach(), "loss": loss.detach()} | gradients


def expected(pair, images, pairs, **options):
    weights, plan = leaves(pair), pair.plan
    found = longhand.family(pair.teacher.state_dict(), weights, images, plan.what, plan.how, pairs, **options)
    return stepped(weights, *found)


def largest_difference(found, other):
    assert found.keys() == other.keys()
    return max((found[name] - other[name]).abs().max().item() for name in other)


def assert_equal(pair, pairs, **options):
    """The pair does what the long-hand does, and something is transferred."""
    images = images_of()
    found = measured(pair, images)
    assert largest_difference(found, expected(pair, images, pairs, **options)) <= 1e-10
    assert (found["loss"] > 0) == (pair.plan.how == "distill")
    alone = longhand.layers(pair.student.state_dict(), images, options.get("heads", 3))[0]
    assert ((found["logits"] - alone).abs().max() > 1e-3) == (pair.plan.how == "copy")


def straight(layers):
    return {layer: layer for layer in layers}


# --- the eight modes


# Else in the plan, the teacher's own options, both's options; the layers, and their heads where not all.
KINDS = {
    "all layers": ({}, {}, CLASS_TOKEN, straight(range(3)), None),
    "one layer": ({"layers": [0]}, {}, AVERAGE, straight([0]), None),
    "other layers, one twice": ({"layers": {0: 3, 1: 0, 2: 3}}, {"depth": 5}, {}, {0: 3, 1: 0, 2: 3}, None),
    "heads": ({"heads": [0, 2]}, {}, {}, straight(range(3)), {layer: [0, 2] for layer in range(3)}),
    "heads of layers": ({"heads": {0: [1], 2: [2, 0]}}, {}, {}, straight(range(3)), {0: [1], 2: [0, 2]}),
}


@all_modes
@pytest.mark.parametrize("kind", KINDS)
def test_all_eight_modes(small_vit, what, how, kind):
    """In layers that a mapping of heads does not name, all heads are transferred."""
    plan, teacher, options, pairs, chosen = KINDS[kind]
    pair = pair_of(small_vit, Plan(what=what, how=how, **plan), teacher=teacher, **options)
    assert_equal(pair, pairs, chosen=chosen)
    assert pair.path == "map-free"


# --- maps that are changed on the way


@pytest.mark.parametrize("how", ["copy", "distill"])
@pytest.mark.parametrize("over", OF_MAPS["average"])
@pytest.mark.parametrize("heads", [None, [1]], ids=["all heads", "one head"])
def test_averages(small_vit, how, over, heads):
    pair = pair_of(small_vit, Plan(how=how, average=over, layers=[0, 2], heads=heads))
    chosen = None if heads is None else {0: heads, 2: heads}
    assert_equal(pair, straight([0, 2]), chosen=chosen, target=lambda maps: longhand.averaged(maps, over))
    assert pair.path == "dense"


def merged_heads(how, remedy):
    """What happens to both sides' maps; a copied single head goes to all three of the student's."""

    def one(p):
        return longhand.merged(p) if remedy == "aggregate" else longhand.averaged([p], "heads")[0][:, :1]

    if how == "copy":
        return {"target": lambda maps: [one(p).expand(-1, 3, -1, -1) for p in maps]}
    return {"target": lambda maps: [one(p) for p in maps], "own": lambda maps: [one(p) for p in maps]}


@pytest.mark.parametrize("how", ["copy", "distill"])
@pytest.mark.parametrize("remedy", ["aggregate", "average"])
@pytest.mark.parametrize(
    "teacher", [{"num_heads": 1}, {"num_heads": 6, "embed_dim": 36, "depth": 4}], ids=str
)
def test_another_number_of_heads(small_vit, how, remedy, teacher):
    pairs = {0: 3, 1: 1} if "depth" in teacher else straight(range(3))
    layers = pairs if "depth" in teacher else None
    pair = pair_of(small_vit, Plan(how=how, unequal_heads=remedy, layers=layers), teacher=teacher)
    assert_equal(pair, pairs, teacher_heads=teacher["num_heads"], **merged_heads(how, remedy))
    assert pair.path == ("dense" if remedy == "average" else "map-free")


def learned(small_vit):
    plan = Plan(how="distill", unequal_heads="learn", layers=[0, 2])
    pair = pair_of(small_vit, plan, teacher={"num_heads": 4})
    with torch.no_grad():
        for M in pair.head_mapping:
            assert M.shape == (4, 3) and torch.allclose(M, torch.full_like(M, 1 / 3))
            M.copy_(torch.randn(4, 3, generator=torch.Generator().manual_seed(1), dtype=M.dtype))
    return pair


def test_a_learned_mapping_of_heads(small_vit):
    """MSE(p_t, M p_s), entry by entry, with gradients to M and to the student."""
    pair, images = learned(small_vit), images_of()
    weights = leaves(pair)
    mappings = [M.detach().clone().requires_grad_() for M in pair.head_mapping]
    _, of_teacher = longhand.layers(pair.teacher.state_dict(), images, 4)
    logits, own = longhand.layers(weights, images, 3)
    loss = 0.0
    for layer, M in zip((0, 2), mappings):
        for t in range(4):
            guess = sum(M[t, s] * own[layer]["map"][:, s] for s in range(3))
            loss = loss + ((guess - of_teacher[layer]["map"][:, t]) ** 2).mean() / 4
    assert largest_difference(measured(pair, images), stepped(weights, logits, loss)) <= 1e-10
    assert pair.path == "dense"
    for M, other in zip(pair.head_mapping, mappings):
        assert other.grad.abs().min() > 0 and (M.grad - other.grad).abs().max() <= 1e-10


@pytest.mark.parametrize("how", ["copy", "distill"])
@pytest.mark.parametrize(
    "teacher_patch, grid, options", [(4, 8, CLASS_TOKEN), (16, 2, AVERAGE)], ids=["finer", "coarser"]
)
def test_another_patch_grid(small_vit, how, teacher_patch, grid, options):
    plan = Plan(how=how, unequal_grid="resample", layers=[0, 2])
    pair = pair_of(small_vit, plan, teacher={"patch_size": teacher_patch}, **options)
    prefix = 0 if "class_token" in options else 1

    def target(maps):
        return [longhand.on_grid(p, (grid, grid), (4, 4), prefix) for p in maps]

    assert_equal(pair, straight([0, 2]), teacher_patch=teacher_patch, target=target)
    assert pair.path == "dense"


# --- maps of which some rows or columns are the student's own


REGISTERS = {"reg_tokens": 2}
DROP, OWN, ALL = {"unequal_prefix": "drop"}, {"unequal_prefix": "own"}, [0, *range(3, 19)]
# Plan, teacher, student; the rows that are transferred, and the tokens that are the student's own.
PARTLY = {
    "the class token's row": (Plan(rows="class"), {}, {}, [0], []),
    "the rows of patches": (Plan(rows="patches"), {}, {}, range(1, 17), []),
    "rows of patches, registers": (Plan(rows="patches"), REGISTERS, REGISTERS, range(3, 19), []),
    "the class token's row, registers dropped": (Plan(rows="class", **DROP), REGISTERS, {}, [0], []),
    "rows of patches, registers dropped": (Plan(rows="patches", **DROP), REGISTERS, {}, range(1, 17), []),
    "tokens of its own": (Plan(**OWN), {}, REGISTERS, ALL, [1, 2]),
    "tokens of its own, others dropped": (Plan(**OWN), {"reg_tokens": 1}, REGISTERS, ALL, [1, 2]),
    "own tokens, rows of patches": (Plan(rows="patches", **OWN), {}, {"reg_tokens": 1}, range(2, 18), [1]),
    "own tokens, the class token's row": (Plan(rows="class", **OWN), {}, {"reg_tokens": 1}, [0], [1]),
}


@pytest.mark.parametrize("how", ["copy", "distill"])
@pytest.mark.parametrize("kind", PARTLY)
def test_rows_and_columns_of_the_students_own(small_vit, how, kind):
    """Maps are written out, row by row."""
    plan, of_teacher, of_student, rows, extra = PARTLY[kind]
    plan = dataclasses.replace(plan, how=how)
    pair = AttentionTransfer(small_vit(seed=1, **of_teacher), small_vit(seed=2, **of_student), plan)
    found, weights = measured(pair.double().train(), images_of()), leaves(pair)
    with torch.no_grad():
        maps = [layer["map"] for layer in longhand.layers(pair.teacher.state_dict(), images_of(), 3)[1]]
    if extra or pair.pairing.teacher_tokens is not None:
        maps = [longhand.without(p, range(1, 1 + of_teacher.get("reg_tokens", 0))) for p in maps]

    def partly(p, own):
        return longhand.partly(p, own, rows, extra)

    logits, seen = longhand.layers(weights, images_of(), 3)
    alone, loss = logits.detach(), torch.zeros(())
    if how == "copy":
        replace = {}
        for layer, p in enumerate(maps):
            replace[layer] = {("map", h): lambda own, p=p[:, h]: partly(p, own) for h in range(3)}
        logits = longhand.layers(weights, images_of(), 3, replace=replace)[0]
    else:
        for p, layer in zip(maps, seen):
            heads = [(partly(p[:, h], own.detach()), own) for h, own in enumerate(layer["map"].unbind(1))]
            loss = loss + sum(-(t[:, i] * own[:, i].log()).sum(-1) for t, own in heads for i in rows).mean()
        loss = loss / (3 * len(rows))
    assert largest_difference(found, stepped(weights, logits, loss)) <= 1e-10 and pair.path == "dense"
    assert (found["loss"] > 0) == (how == "distill")
    assert ((found["logits"] - alone).abs().max() > 1e-3) == (how == "copy")
    q_and_k = found["blocks.0.attn.qkv.weight"][:48]
    assert (q_and_k != 0).any(), "what is its own has a gradient, also where the rest is copied"


@pytest.mark.parametrize("how", ["copy", "distill"])
def test_all_remedies_at_once(small_vit, how):
    """Registers dropped, heads merged, then moved to another grid, then averaged over layers."""
    unequal = {"unequal_heads": "aggregate", "unequal_grid": "resample", "unequal_prefix": "drop"}
    plan = Plan(how=how, layers={0: 4, 2: 1}, average="layers", **unequal)
    pair = pair_of(small_vit, plan, teacher={"depth": 5, "num_heads": 4, "patch_size": 4, "reg_tokens": 1})

    def target(maps):
        kept = [longhand.merged(longhand.without(p, [1])) for p in maps]
        moved = [longhand.on_grid(p, (8, 8), (4, 4), 1) for p in kept]
        return [p.expand(-1, 3 if how == "copy" else 1, -1, -1) for p in longhand.averaged(moved, "layers")]

    own = (lambda maps: [longhand.merged(p) for p in maps]) if how == "distill" else None
    assert_equal(pair, {0: 4, 2: 1}, teacher_heads=4, teacher_patch=4, target=target, own=own)


# --- what is not computed


@all_modes
def test_the_teacher_stops_at_what_is_needed(small_vit, what, how):
    """Bombs after layer 1's projections and in the head; NaN in the rows that are not transferred."""
    pair = pair_of(small_vit, Plan(what=what, how=how, layers=[0, 1]))
    before = measured(pair, images_of())
    mine(pair.teacher, after=1)
    if what == "map":
        poison(pair.teacher.blocks[1].attn, "v")
    after = measured(pair, images_of())
    assert all(torch.allclose(before[name], after[name], rtol=0, atol=1e-12) for name in before)


def poison(attn, parts):
    with torch.no_grad():
        for part in parts:
            third = slice("qkv".index(part) * 24, ("qkv".index(part) + 1) * 24)
            attn.qkv.weight[third] = attn.qkv.bias[third] = torch.nan


@pytest.mark.parametrize("what, unused", [("map", "qk"), ("q", "q"), ("k", "k"), ("v", "v")])
def test_what_a_student_copies_it_does_not_compute(small_vit, what, unused):
    pair = pair_of(small_vit, Plan(what=what, layers=[0, 2]))
    before = pair(images_of()).logits
    for layer in (0, 2):
        poison(pair.student.blocks[layer].attn, unused)
    assert torch.allclose(pair(images_of()).logits, before, rtol=0, atol=1e-12)
    poison(pair.student.blocks[1].attn, unused)
    assert pair(images_of()).logits.isnan().all(), "the poison works"


@pytest.mark.parametrize("what", ["map", "v"])
def test_the_teacher_runs_in_inference_mode_and_the_autocast_dtype(small_vit, what):
    pair, seen = pair_of(small_vit, Plan(what=what, how="distill"), dtype=torch.float32), []
    pair.teacher.requires_grad_(True)  # whatever its owner does
    pair.teacher.blocks[0].attn.qkv.register_forward_hook(
        lambda module, inputs, output: seen.append((torch.is_inference_mode_enabled(), output.dtype))
    )
    with torch.autocast("cpu", torch.bfloat16):
        target = pair.teacher_layers(images_of(torch.float32))
        pair(images_of(torch.float32)).transfer_loss.backward()
    assert seen == [(True, torch.bfloat16)] * 2
    for each in target:
        kept = [x for x in (each.q, each.k, each.v) if x is not None]
        assert len(kept) == (2 if what == "map" else 1)
        assert not any(x.is_inference() or x.requires_grad for x in kept)
        assert all(x.dtype == torch.bfloat16 for x in kept)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copy_of_a_pair_learns_its_own_mapping_of_heads(small_vit, copied):
    pair = learned(small_vit)
    again, images = copied(pair), images_of()
    assert torch.equal(again(images).transfer_loss, pair(images).transfer_loss)
    before = pair(images).transfer_loss.item()
    again(images).transfer_loss.backward()
    assert all(M.grad is not None for M in again.head_mapping) and pair.head_mapping[0].grad is None
    with torch.no_grad():
        again.head_mapping[0].zero_()
    assert again(images).transfer_loss.item() != before == pair(images).transfer_loss.item()
