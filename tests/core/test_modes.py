"""Every mode of transfer against the same step from plain matrices, in float64: logits, loss and all
gradients of the student."""

import copy
import dataclasses
import pickle

import pytest
import torch
from torch.nn.functional import cross_entropy

from atlib import AttentionTransfer, Plan, create_vit
from atlib.baselines import MeanMapCopy
from atlib.checkpoint import load_bundle, save_bundle
from atlib.plan import AVERAGES
from atlib.vit import Architecture
from tests import longhand
from tests.helpers import SMALL_VIT, mine, random_images, randomise

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
    """Logits, transfer loss, and the gradients of task loss + λ · transfer loss; zero where there are
    none."""
    pair.zero_grad()
    output = pair(images)
    (cross_entropy(output.logits, LABELS) + LAMBDA * output.transfer_loss).backward()
    found = {
        name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in pair.student.named_parameters()
    }
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
    """The pair does what the long-hand does; and something is transferred, so that neither can pass by doing
    nothing."""
    images = images_of()
    found = measured(pair, images)
    assert largest_difference(found, expected(pair, images, pairs, **options)) <= 1e-10
    assert (found["loss"] > 0) == (pair.plan.how == "distill")
    alone = longhand.layers(pair.student.state_dict(), images, options.get("heads", 3))[0]
    assert ((found["logits"] - alone).abs().max() > 1e-3) == (pair.plan.how == "copy")


def straight(layers):
    return {layer: layer for layer in layers}


# --- the eight modes


@all_modes
@pytest.mark.parametrize("layers", [None, range(2), [0]], ids=str)
@pytest.mark.parametrize("options", [CLASS_TOKEN, AVERAGE], ids=["class token", "average"])
def test_all_eight_modes(small_vit, what, how, layers, options):
    pair = pair_of(small_vit, Plan(what=what, how=how, layers=layers), **options)
    assert_equal(pair, straight(range(3) if layers is None else layers))
    assert pair.path == "map-free"


@all_modes
@pytest.mark.parametrize("pairs", [{0: 3, 2: 0}, {1: 4}, {0: 1, 1: 1, 2: 4}], ids=str)
def test_layers_paired_between_different_depths(small_vit, what, how, pairs):
    assert_equal(pair_of(small_vit, Plan(what=what, how=how, layers=pairs), teacher={"depth": 5}), pairs)


HEADS = {
    "a list": ([0, 2], {layer: [0, 2] for layer in range(3)}),
    "per layer": ({0: [1], 2: [2, 0]}, {0: [1], 2: [0, 2]}),
}


@all_modes
@pytest.mark.parametrize("kind", HEADS)
def test_some_heads(small_vit, what, how, kind):
    """In layers that a mapping does not name, all heads are transferred."""
    heads, chosen = HEADS[kind]
    pair = pair_of(small_vit, Plan(what=what, how=how, heads=heads))
    assert_equal(pair, straight(range(3)), chosen=chosen)
    assert pair.path == "map-free"


# --- maps that are changed on the way


@pytest.mark.parametrize("how", ["copy", "distill"])
@pytest.mark.parametrize("over", AVERAGES)
@pytest.mark.parametrize("heads", [None, [1]], ids=["all heads", "one head"])
def test_averages(small_vit, how, over, heads):
    pair = pair_of(small_vit, Plan(how=how, average=over, layers=[0, 2], heads=heads))
    chosen = None if heads is None else {0: heads, 2: heads}
    assert_equal(pair, straight([0, 2]), chosen=chosen, target=lambda maps: longhand.averaged(maps, over))
    assert pair.path == "dense"


ONE_IMAGE = {
    "whole": Plan(),
    "resampled": Plan(unequal_grid="resample"),
    **{f"mean over {over}": Plan(average=over) for over in AVERAGES},
}


def sorted_by_class(number=24, classes=4):
    """Images of one class look alike, and stand together: (images, a shuffled order)."""
    kinds = torch.arange(number) // (number // classes)
    images = random_images(classes, 3, 32, 32)[kinds] + 0.1 * random_images(number, 3, 32, 32, seed=1)
    return images, torch.randperm(number, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", [*ONE_IMAGE, "mean over examples"])
def test_an_image_is_answered_the_same_in_every_batch(small_vit, kind):
    """Alone, in batches sorted by class, and in shuffled ones."""
    images, order = sorted_by_class()
    if kind == "mean over examples":
        pair = MeanMapCopy(small_vit(seed=1), small_vit(seed=2), images)
    else:
        other = {"patch_size": 4} if kind == "resampled" else {}
        pair = pair_of(small_vit, ONE_IMAGE[kind], other, dtype=torch.float32)
    pair.eval()
    with torch.no_grad():
        alone = torch.cat([pair(image[None]).logits for image in images])
        in_order = torch.cat([pair(some).logits for some in images.split(6)])
        shuffled = torch.cat([pair(images[some]).logits for some in order.split(6)])
    torch.testing.assert_close(in_order, alone, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(shuffled, alone[order], rtol=1e-5, atol=1e-5)
    assert (alone - alone[:1]).abs().max() > 1e-2, "it does answer images"


def merged_heads(how, remedy):
    """What happens to the teacher's and to the student's maps; a copied single head goes to all three of the
    student's."""

    def one(p):
        return longhand.merged(p) if remedy == "aggregate" else longhand.averaged([p], "heads")[0][:, :1]

    if how == "copy":
        return {"target": lambda maps: [one(p).expand(-1, 3, -1, -1) for p in maps]}
    return {"target": lambda maps: [one(p) for p in maps], "own": lambda maps: [one(p) for p in maps]}


@pytest.mark.parametrize("how", ["copy", "distill"])
@pytest.mark.parametrize("remedy", ["aggregate", "average"])
@pytest.mark.parametrize(
    "teacher", [{"num_heads": 4}, {"num_heads": 1}, {"num_heads": 6, "embed_dim": 36, "depth": 4}], ids=str
)
def test_another_number_of_heads(small_vit, how, remedy, teacher):
    pairs = {0: 3, 1: 1} if "depth" in teacher else straight(range(3))
    layers = pairs if "depth" in teacher else None
    pair = pair_of(small_vit, Plan(how=how, unequal_heads=remedy, layers=layers), teacher=teacher)
    assert_equal(pair, pairs, teacher_heads=teacher["num_heads"], **merged_heads(how, remedy))
    assert pair.path == ("dense" if remedy == "average" else "map-free")


def learned(small_vit):
    pair = pair_of(
        small_vit, Plan(how="distill", unequal_heads="learn", layers=[0, 2]), teacher={"num_heads": 4}
    )
    with torch.no_grad():
        for M in pair.head_mapping:
            assert M.shape == (4, 3) and torch.allclose(M, torch.full_like(M, 1 / 3)), (
                "it starts as the mean over heads"
            )
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
@pytest.mark.parametrize("options", [CLASS_TOKEN, AVERAGE], ids=["class token", "average"])
@pytest.mark.parametrize("teacher_patch, grid", [(4, 8), (16, 2)], ids=["finer teacher", "coarser teacher"])
def test_another_patch_grid(small_vit, how, options, teacher_patch, grid):
    pair = pair_of(
        small_vit,
        Plan(how=how, unequal_grid="resample", layers=[0, 2]),
        teacher={"patch_size": teacher_patch},
        **options,
    )
    prefix = 0 if "class_token" in options else 1
    assert_equal(
        pair,
        straight([0, 2]),
        teacher_patch=teacher_patch,
        target=lambda maps: [longhand.on_grid(p, grid, 4, prefix) for p in maps],
    )
    assert pair.path == "dense"


@pytest.mark.parametrize("registers", [(0, 2), (1, 3)], ids=str)
def test_registers_of_a_distilled_student_are_dropped(small_vit, registers):
    pair = pair_of(
        small_vit,
        Plan(how="distill", unequal_prefix="drop"),
        teacher={"reg_tokens": registers[0]},
        reg_tokens=registers[1],
    )
    of_teacher, of_student = (range(1, 1 + count) for count in registers)
    assert_equal(
        pair,
        straight(range(3)),
        target=lambda maps: [longhand.without(p, of_teacher) for p in maps],
        own=lambda maps: [longhand.without(p, of_student) for p in maps],
    )


# --- maps of which some rows or columns are the student's own


REGISTERS = {"reg_tokens": 2}
DROP, OWN, ALL = {"unequal_prefix": "drop"}, {"unequal_prefix": "own"}, [0, *range(3, 19)]
# Plan, teacher, student; the rows that are transferred, and the tokens that are the student's own.
PARTLY = {
    "the class token's row": (Plan(rows="class"), {}, {}, [0], []),
    "the rows of patches": (Plan(rows="patches"), {}, {}, range(1, 17), []),
    "rows of patches, registers": (Plan(rows="patches"), REGISTERS, REGISTERS, range(3, 19), []),
    "the class token's row, registers dropped": (Plan(rows="class", **DROP), REGISTERS, {}, [0], []),
    "tokens of its own": (Plan(**OWN), {}, REGISTERS, ALL, [1, 2]),
    "tokens of its own, others dropped": (Plan(**OWN), {"reg_tokens": 1}, REGISTERS, ALL, [1, 2]),
    "own tokens, rows of patches": (Plan(rows="patches", **OWN), {}, {"reg_tokens": 1}, range(2, 18), [1]),
    "own tokens, the class token's row": (Plan(rows="class", **OWN), {}, {"reg_tokens": 1}, [0], [1]),
}


def partly_expected(pair, images, rows, extra, chosen=None):
    """Logits, loss and gradients where some rows and columns are the student's own: maps are written out, row
    by row."""
    teacher, weights = pair.teacher.state_dict(), leaves(pair)
    number = 0 if pair.teacher.reg_token is None else pair.teacher.reg_token.shape[1]
    same_kinds = not extra and pair.pairing.teacher_tokens is None
    with torch.no_grad():
        maps = [layer["map"] for layer in longhand.layers(teacher, images, 3)[1]]
        maps = maps if same_kinds else [longhand.without(p, range(1, 1 + number)) for p in maps]
    heads = range(3) if chosen is None else chosen
    layers = range(3) if pair.plan.layers is None else pair.plan.layers
    if pair.plan.how == "copy":
        replace = {
            layer: {
                ("map", h): lambda own, p=maps[layer][:, h]: longhand.partly(p, own, rows, extra)
                for h in heads
            }
            for layer in layers
        }
        logits, loss = longhand.layers(weights, images, 3, replace=replace)[0], torch.zeros(())
    else:
        logits, seen = longhand.layers(weights, images, 3)
        loss = 0.0
        for layer in layers:
            of_heads = []
            for h in heads:
                own = seen[layer]["map"][:, h]
                target = longhand.partly(maps[layer][:, h], own.detach(), rows, extra)
                of_heads += [-(target[:, i] * own[:, i].log()).sum(-1).mean() for i in rows]
            loss = loss + sum(of_heads) / len(of_heads)
    return stepped(weights, logits, loss)


def assert_partly(pair, rows, extra, chosen=None):
    found = measured(pair, images_of())
    assert largest_difference(found, partly_expected(pair, images_of(), rows, extra, chosen)) <= 1e-10
    assert (found["loss"] > 0) == (pair.plan.how == "distill") and pair.path == "dense"
    alone = longhand.layers(pair.student.state_dict(), images_of(), 3)[0]
    assert ((found["logits"] - alone).abs().max() > 1e-3) == (pair.plan.how == "copy")
    return found


@pytest.mark.parametrize("how", ["copy", "distill"])
@pytest.mark.parametrize("kind", PARTLY)
def test_rows_and_columns_of_the_students_own(small_vit, how, kind):
    plan, teacher, student, rows, extra = PARTLY[kind]
    plan = dataclasses.replace(plan, how=how)
    pair = AttentionTransfer(small_vit(seed=1, **teacher), small_vit(seed=2, **student), plan)
    found = assert_partly(pair.double().train(), rows, extra)
    q_and_k = found["blocks.0.attn.qkv.weight"][:48]
    assert (q_and_k != 0).any(), "what is its own has a gradient, also where the rest is copied"


def test_to_distill_tokens_of_its_own_are_a_weight_and_a_constant(small_vit):
    """(1 - s) times the row's cross-entropy without these tokens, plus the entropy of (s, 1 - s)."""
    own, drop = (
        pair_of(
            small_vit, Plan(how="distill", layers=[1], unequal_prefix=each), {"reg_tokens": 0}, reg_tokens=1
        )
        for each in ("own", "drop")
    )
    p = longhand.layers(own.student.state_dict(), images_of(), 3)[1][1]["map"]
    target = longhand.layers(own.teacher.state_dict(), images_of(), 3)[1][1]["map"]
    s = p[:, :, [0, *range(2, 18)], 1]
    rows = -(target * longhand.without(p, [1]).log()).sum(-1)
    entropy = -(s * s.log() + (1 - s) * (1 - s).log())
    assert measured(drop, images_of())["loss"].item() == pytest.approx(rows.mean().item(), rel=1e-12)
    expected = ((1 - s) * rows + entropy).mean().item()
    assert measured(own, images_of())["loss"].item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("how", ["copy", "distill"])
def test_rows_on_another_patch_grid(small_vit, how):
    """The class token's row of the resampled map, of which all rows are transferred elsewhere."""
    plan = Plan(how=how, unequal_grid="resample", layers=[0])
    of_all, of_class = (
        pair_of(small_vit, dataclasses.replace(plan, rows=rows), {"patch_size": 4})
        for rows in (None, "class")
    )
    (p,) = of_class.teacher_maps(of_class.teacher_layers(images_of()))
    assert torch.equal(p, of_all.teacher_maps(of_all.teacher_layers(images_of()))[0])
    if how == "copy":
        maps = [each.walk(images_of()).layers[0].map for each in (of_all, of_class)]
        assert torch.equal(maps[0][:, :, 0], maps[1][:, :, 0])
        own = longhand.layers(of_class.student.state_dict(), images_of(), 3)[1][0]["map"]
        assert (maps[1][:, :, 1:] - own[:, :, 1:]).abs().max() <= 1e-12
    else:
        own = longhand.layers(of_class.student.state_dict(), images_of(), 3)[1][0]["map"]
        expected = -(p[:, :, 0] * own[:, :, 0].log()).sum(-1).mean().item()
        assert measured(of_class, images_of())["loss"].item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("how", ["copy", "distill"])
def test_all_remedies_at_once(small_vit, how):
    """Registers dropped, heads merged, then moved to another grid, then averaged over layers."""
    plan = Plan(
        how=how,
        layers={0: 4, 2: 1},
        unequal_heads="aggregate",
        unequal_grid="resample",
        unequal_prefix="drop",
        average="layers",
    )
    pair = pair_of(small_vit, plan, teacher={"depth": 5, "num_heads": 4, "patch_size": 4, "reg_tokens": 1})

    def target(maps):
        moved = [longhand.on_grid(longhand.merged(longhand.without(p, [1])), 8, 4, 1) for p in maps]
        return [p.expand(-1, 3 if how == "copy" else 1, -1, -1) for p in longhand.averaged(moved, "layers")]

    own = (lambda maps: [longhand.merged(p) for p in maps]) if how == "distill" else None
    assert_equal(pair, {0: 4, 2: 1}, teacher_heads=4, teacher_patch=4, target=target, own=own)


# --- what is not computed


@all_modes
def test_the_teacher_stops_at_what_is_needed(small_vit, what, how):
    """Bombs in everything after layer 1's projections and in the head; NaN in the rows of its projection that
    are not transferred."""
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
            attn.qkv.weight[third] = torch.nan
            attn.qkv.bias[third] = torch.nan


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
        assert len(kept) == (2 if what == "map" else 1) and not any(
            x.is_inference() or x.requires_grad for x in kept
        )
        assert all(x.dtype == torch.bfloat16 for x in kept)


# --- pairs that are kept, mixed, matched


BUNDLES = {
    "layers and heads": (Plan(layers={0: 3, 2: 1}, heads={2: [0, 2]}), {"depth": 4}),
    "merged heads": (Plan(unequal_heads="aggregate", layers=[1]), {"num_heads": 4}),
    "grid, prefix, average": (
        Plan(unequal_grid="resample", unequal_prefix="drop", average="queries"),
        {"patch_size": 4, "reg_tokens": 1},
    ),
    "mismatched": (Plan(what="q", mismatched=True), {"init_values": 0.1}),
}


@pytest.mark.parametrize("name", BUNDLES)
def test_a_bundle_keeps_the_plan(small_vit, tmp_path, name):
    plan, teacher = BUNDLES[name]
    pair = pair_of(small_vit, plan, teacher, dtype=torch.float32).eval()
    named = [Architecture("vit_tiny_patch16_224", SMALL_VIT | change) for change in ({}, teacher)]
    found = load_bundle(save_bundle(tmp_path / "bundle.safetensors", pair, *named))
    assert (
        found.plan == plan
        and found.path == pair.path
        and found.mismatched == pair.mismatched
        and found.pairing == pair.pairing
    )
    images = images_of(torch.float32)
    torch.testing.assert_close(found(images).logits, pair(images).logits)


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


def test_a_copied_student_may_be_of_another_kind_than_its_teacher():
    """A teacher with rotary positions: its maps are those after rotation, and a copying student needs no
    rotation of its own."""
    teacher = randomise(
        create_vit(
            "vit_small_patch16_dinov3", img_size=64, embed_dim=24, depth=2, num_heads=3, num_classes=0
        ),
        1,
    ).eval()
    student = randomise(create_vit(SMALL_VIT | {"img_size": 64, "patch_size": 16, "depth": 2}), 2).eval()
    pair = AttentionTransfer(teacher.double(), student.double(), Plan(unequal_prefix="drop", mismatched=True))
    images = random_images(2, 3, 64, 64, dtype=torch.float64)
    rotated = []
    for block in teacher.blocks:  # what timm itself hands to its fused kernel
        block.attn.fused_attn = False
        block.attn.attn_drop.register_forward_hook(lambda module, inputs, output: rotated.append(inputs[0]))
    with torch.no_grad():
        teacher(images)
    maps = [longhand.without(p, range(1, 1 + teacher.num_prefix_tokens - 1)) for p in rotated]
    replace = {layer: {("map", head): p[:, head] for head in range(3)} for layer, p in enumerate(maps)}
    logits = longhand.layers(student.state_dict(), images, 3, patch=16, replace=replace)[0]
    assert len(maps) == 2 and (pair(images).logits - logits).abs().max() <= 1e-10
