"""The benchmark of transfer steps: its FLOP counts, its memory counts, its dense baseline, its arithmetic,
and one small run."""

import json
from functools import partial

import flops
import methods
import others
import pytest
import torch
import transfer_step
from dense_baseline import DenseTransfer, dense_forward
from memory import peak_allocated
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from atbook.records import read_file
from atlib import AttentionTransfer, Plan, create_vit, walk
from atlib.attention import Instead, find_projections
from tests.helpers import random_images, randomise

CPU = torch.device("cpu")
BATCH = 2


def vit(seed=0):
    """A ViT whose sizes are all different, with attention written out, so that every matrix product is
    counted once."""
    sizes = {"img_size": 24, "patch_size": 8, "embed_dim": 12, "mlp_ratio": 3}
    made = create_vit(sizes | {"depth": 4, "num_heads": 3, "num_classes": 5})
    for block in made.blocks:
        block.attn.fused_attn = False
    return randomise(made, seed)


@pytest.fixture
def images():
    return random_images(BATCH, 3, 24, 24)


def forward_flops(action):
    """FLOPs per image of the matrix products of `action()` as PyTorch counts them, and its result."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        result = action()
    return counter.get_total_flops() / BATCH, result


def both_ways(action):
    """FLOPs per image of `action()` and of the backward pass of the sum of what it returns."""
    with FlopCounterMode(display=False) as counter:
        action().sum().backward()
    return counter.get_total_flops() / BATCH


def sparing_walk(model, images, **options):
    """A walk that computes no rows of q, k or v that nobody reads, as a pair's do."""
    _, projections = find_projections(model, images)
    return lambda: walk(model, images, projections=projections, **options)


def teacher_maps(teacher, images, layers):
    """FLOPs per image up to the maps of the first `layers` layers, and these maps."""
    spent, stopped = forward_flops(sparing_walk(teacher, images, stop_after=layers - 1))
    seen = stopped.layers
    of_last, last = forward_flops(lambda: seen[-1].map)
    return spent + of_last, [one.map for one in seen[:-1]] + [last]


@pytest.mark.parametrize("layers", [1, 3, 4])
def test_flops_of_copy(images, layers):
    student = vit(2)
    shape = flops.shape_of(student)
    spent, maps = teacher_maps(vit(1), images, layers)
    assert spent == flops.teacher(shape, layers)
    replace = {i: Instead(map=p) for i, p in enumerate(maps)}
    copied = sparing_walk(student, images, replace=replace)
    spent += both_ways(lambda: copied().logits)
    again = (
        shape.depth - layers
    ) * shape.mixing  # fused attention makes a map once more in the backward pass
    assert spent == flops.copy(shape, layers) + again
    assert flops.copy(shape) == flops.copy(shape, 4)


@pytest.mark.parametrize("layers", [1, 3, 4])
def test_flops_of_distill(images, layers):
    student = vit(2)
    shape = flops.shape_of(student)
    spent, maps = teacher_maps(vit(1), images, layers)

    def loss():
        logits, scores, _ = dense_forward(student, images, {})
        return logits.sum() + sum((p * z.log_softmax(-1)).sum() for p, z in zip(maps, scores))

    assert spent + both_ways(loss) == flops.distill(shape, layers)
    assert flops.distill(shape) == flops.distill(shape, 4)


def test_flops_of_projected_features(images):
    """For each pair of layers a product forward and two backward."""
    shape, wide = flops.shape_of(vit()), flops.shape_of(vit())._replace(width=20)
    projector = torch.nn.Linear(shape.width, 20, bias=False)
    stream = torch.zeros(BATCH, shape.tokens, shape.width, requires_grad=True)
    spent = both_ways(lambda: projector(stream).sum())
    without = flops.feature_distillation(shape, 2, wide)
    assert without == flops.fine_tuning(shape) + wide.embed + 2 * wide.block
    assert flops.feature_distillation(shape, 2, wide, projectors=3) == without + 3 * spent


@pytest.mark.parametrize(
    ("how", "layers"),
    [("copy", (0, 1, 2, 3)), ("copy", (1, 3)), ("distill", (0, 1, 2)), ("distill", (0, 1, 2, 3))],
)
def test_dense_baseline_agrees_with_atlib(images, how, layers):
    results = []
    for build in (
        lambda t, s: DenseTransfer(t, s, how, layers),
        lambda t, s: AttentionTransfer(t, s, Plan(how=how, layers=layers)),
    ):
        student = vit(2)
        logits, transfer_loss = build(vit(1), student).train()(images)
        (cross_entropy(logits, torch.tensor([0, 4])) + 3 * transfer_loss).backward()
        results.append((logits, transfer_loss, {name: p.grad for name, p in student.named_parameters()}))
    (logits, loss, gradients), (our_logits, our_loss, our_gradients) = results
    torch.testing.assert_close(our_logits, logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(our_loss, loss, rtol=1e-5, atol=0)
    assert (how == "distill") == (loss > 0)
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            our_gradients[name], gradient, rtol=1e-4, atol=1e-4 * gradient.abs().max().item(), msg=name
        )


def test_memory_of_known_allocations():
    def action():
        kept = torch.empty(1_000_000)  # 4 MB
        gone = torch.empty(500_000)  # 2 MB, released before the next
        del gone
        also = torch.empty(250_000)  # 1 MB
        return kept, also

    assert peak_allocated(action, CPU) == 6_000_000
    assert peak_allocated(action, CPU) == 6_000_000, "a second measurement starts from nothing"
    before = torch.ones(3_000_000)
    assert peak_allocated(before.clone, CPU) == 12_000_000, "what was there before does not count"
    assert peak_allocated(lambda: None, CPU) == 0


@pytest.mark.slow
def test_the_command_prints_a_table_and_writes_a_record(tmp_path, capsys, monkeypatch):
    """With ViTs of four layers."""
    monkeypatch.setattr(methods, "create_vit", partial(create_vit, depth=4))
    out = tmp_path / "records.jsonl"
    threads = torch.get_num_threads()
    try:
        small = "--model tiny --batch 1 --memory-batches 2 --repetitions 1 --threads 1"
        transfer_step.main([*small.split(), "--out", str(out)])
    finally:
        torch.set_num_threads(threads)
    (record,), printed = read_file(out), capsys.readouterr().out
    assert (record.experiment, record.method) == ("benchmarks", "transfer_step-tiny-197-cpu")
    assert record.config["model"] == "tiny" and record.config["batch"] == 1 and "out" not in record.config
    by_method = record.results["methods"]
    plain = by_method["fine-tune"]
    assert list(by_method) == list(methods.known_methods(4))
    for name, one in by_method.items():
        assert one["title"] in printed
        assert one["seconds"] == one["seconds_min"] == record.history[0][name]
        assert one["images_per_second"] == pytest.approx(1 / one["seconds"])
        assert one["ratio"] == pytest.approx(one["seconds"] / plain["seconds"])
        assert one["memory_ratio"] == pytest.approx(one["peak_memory_mb"] / plain["peak_memory_mb"])
        # weights of four matrices, biases and norms of a block of width 192
        block = 12 * 192**2 + 13 * 192
        blocks = {"fine-tune": 0, "distill-part": 3, "dense-distill-part": 3}.get(name, 4)
        assert one["teacher_mb"] == pytest.approx(4e-6 * block * blocks)
        held = plain["peak_memory_mb"] + one["teacher_mb"]
        assert one["memory_ratio_with_teacher"] == pytest.approx(one["peak_memory_mb"] / held)
        assert one["flops_per_image"] >= 0.99 * one["least_flops_per_image"], name
        assert one["peak_memory_mb"] > 4 * 4e-6 * 4 * block, "weights, gradients, two moments"
    assert plain["ratio"] == plain["memory_ratio"] == plain["least_flops_ratio"] == 1
    by_batch = record.results["memory_by_batch"]
    assert set(by_batch["2"]) == set(transfer_step.IN_MEMORY_BY_BATCH)
    assert by_batch["2"]["fine-tune"] > by_batch["1"]["fine-tune"]
    assert record.results["loss"]["growth"]["map-free"] < 4.5 < record.results["loss"]["growth"]["dense"]
    assert record.results["targets"]["loss_memory_growth"]["hit"]
    json.dumps(record.results, allow_nan=False)


@pytest.mark.slow
def test_a_step_beside_other_libraries(tmp_path, monkeypatch):
    """With ViTs of four layers."""
    monkeypatch.setattr(others, "create_vit", partial(create_vit, depth=4))
    out, threads = tmp_path / "records.jsonl", torch.get_num_threads()
    try:
        others.main(["--batch", "1", "--repetitions", "1", "--threads", "1", "--out", str(out)])
    finally:
        torch.set_num_threads(threads)
    (record,) = read_file(out)
    (seconds,), measured = record.history, record.results["methods"]
    assert list(measured)[:4] == ["scratch", "atlib, Distill", "timm, features", "timm, logits"]
    for name, row in measured.items():
        assert row["seconds"] == seconds[name] > 0
        assert row["ratio"] == pytest.approx(seconds[name] / seconds["scratch"])
