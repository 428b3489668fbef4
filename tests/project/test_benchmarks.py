"""The benchmarks: FLOP counts, memory counts, dense baseline, arithmetic, and one small run of each."""

from functools import partial
from importlib import import_module
from pathlib import Path

import data
import flops
import linear_attention
import methods
import on_a_gpu
import others
import processes
import pytest
import throughput
import torch
import transfer_step
from dense_baseline import DenseTransfer
from memory import peak_allocated
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from atbook.lab.scales import scales
from atbook.lab.studies import CENTRAL, STUDIES
from atbook.lab.study import Place, Sources
from atbook.records import read_file
from atlib import AttentionTransfer, Plan, create_vit
from atlib.pair import student_of
from tests.helpers import random_images, randomise
from tests.picture_files import write_parquet

CPU = torch.device("cpu")
BATCH = 2


def vit(seed=0):
    """A ViT whose sizes are all different, with attention written out."""
    sizes = {"img_size": 24, "patch_size": 8, "embed_dim": 12, "mlp_ratio": 3}
    made = create_vit(sizes | {"depth": 4, "num_heads": 3, "num_classes": 5})
    for block in made.blocks:
        block.attn.fused_attn = False
    return randomise(made, seed)


@pytest.fixture
def images():
    return random_images(BATCH, 3, 24, 24)


@pytest.fixture
def one_run(tmp_path):
    """A function that runs a benchmark once, and returns its record; threads are then as many as before."""
    out, threads = tmp_path / "records.jsonl", torch.get_num_threads()

    def run(benchmark, words):
        benchmark.main([*words.split(), "--out", str(out)])
        (record,) = read_file(out)
        return record

    yield run
    torch.set_num_threads(threads)


def both_ways(action):
    """FLOPs per image of `action()` and of the backward pass of the sum of what it returns."""
    with FlopCounterMode(display=False) as counter:
        action().sum().backward()
    return counter.get_total_flops() / BATCH


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
        close = {"rtol": 1e-4, "atol": 1e-4 * gradient.abs().max().item()}
        torch.testing.assert_close(our_gradients[name], gradient, **close, msg=name)


def test_memory_of_known_allocations():
    def action():
        kept = torch.empty(1_000_000)  # 4 MB
        gone = torch.empty(500_000)  # 2 MB, released before the next
        del gone
        also = torch.empty(250_000)  # 1 MB
        return kept, also

    assert peak_allocated(action, CPU) == 6_000_000
    before = torch.ones(3_000_000)
    assert peak_allocated(before.clone, CPU) == 12_000_000, "what was there before does not count"


@pytest.mark.slow
def test_a_transfer_step(one_run, monkeypatch):
    """With ViTs of two layers."""
    monkeypatch.setattr(methods, "create_vit", partial(create_vit, depth=2))
    record = one_run(transfer_step, "--model tiny --batch 1 --memory-batches 2 --repetitions 1 --threads 1")
    by_method = record.results["methods"]
    plain = by_method["fine-tune"]
    assert list(by_method) == list(methods.known_methods(2))
    for name, one in by_method.items():
        assert one["seconds"] == record.history[0][name]
        assert one["images_per_second"] == pytest.approx(1 / one["seconds"])
        assert one["ratio"] == pytest.approx(one["seconds"] / plain["seconds"])
        assert one["memory_ratio"] == pytest.approx(one["peak_memory_mb"] / plain["peak_memory_mb"])
        # weights of four matrices, biases and norms of a block of width 192
        block = 12 * 192**2 + 13 * 192
        blocks = {"fine-tune": 0, "distill-part": 1, "dense-distill-part": 1}.get(name, 2)
        assert one["teacher_mb"] == pytest.approx(4e-6 * block * blocks)
        held = plain["peak_memory_mb"] + one["teacher_mb"]
        assert one["memory_ratio_with_teacher"] == pytest.approx(one["peak_memory_mb"] / held)
        assert one["flops_per_image"] >= 0.99 * one["least_flops_per_image"], name
        assert one["peak_memory_mb"] > 4 * 4e-6 * 2 * block, "weights, gradients, two moments"
    assert record.results["loss"]["growth"]["map-free"] < 4.5 < record.results["loss"]["growth"]["dense"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "benchmark, words, of, reference, power",
    [
        (others, "--batch 1 --threads 1", "methods", "scratch", 1),
        (throughput, "--batch 2 --passes 1", "networks", "vit", -1),
    ],
)
def test_ratios_are_taken_within_a_repetition(one_run, monkeypatch, benchmark, words, of, reference, power):
    """Of seconds, or of images a second."""
    monkeypatch.setattr(others, "create_vit", partial(create_vit, depth=2))
    record = one_run(benchmark, f"{words} --repetitions 2")
    for name, row in record.results[of].items():
        ratios = [(seconds[name] / seconds[reference]) ** power for seconds in record.history]
        assert row["ratio"] == pytest.approx(sum(ratios) / 2), "the median of two is their mean"
        assert row.get("images_per_second", 2 / row["seconds"]) == pytest.approx(2 / row["seconds"])


# --- Throughput: its networks are those of the studies ---

SIZES = throughput.Sizes.of(create_vit("glyphs"))
# What the page of costs puts on one point with a network.
RECORDED = {
    "vit": (CENTRAL, "scratch"),
    "cait": (STUDIES["class-attention"], "cait, scratch"),
    "resmlp": (STUDIES["static-routing"], "resmlp"),
    "patch-conv": (STUDIES["one-softmax"], "attention"),
    "local": (STUDIES["locality"], "local, scratch, 1000 labels"),
    "binary": (STUDIES["bits"], "nothing, one-bit maps"),
}


def shapes(model):
    return {name: tuple(weight.shape) for name, weight in student_of(model).state_dict().items()}


@pytest.mark.parametrize("name", RECORDED)
def test_a_network_is_the_one_whose_accuracy_is_recorded(name):
    study, method = RECORDED[name]
    place = Place("find", None, Path("results"), Path("work"))
    trained = study.variant(method).build(Sources(place, scales()["find"], 0))
    measured = throughput.NETWORKS[name].build(SIZES)
    assert type(measured) is type(trained) and shapes(measured) == shapes(trained)


# --- Processes: what is computed, against a ring played through ---


def ring(pieces, rounds):
    """Bytes that every process sends when in each round each passes a piece on to its neighbour."""
    sent = [0] * len(pieces)
    for turn in range(rounds):
        for rank in range(len(pieces)):
            sent[rank] += pieces[(rank - turn) % len(pieces)]
    return sent


@pytest.mark.parametrize("gpus", [2, 5, 8])
def test_bytes_of_an_all_reduce(gpus):
    """A ring: n - 1 rounds in which pieces are summed up, n - 1 in which the sums go round."""
    weights = 11 * 2 * 5 * 8
    pieces = [4 * weights // gpus] * gpus
    sent = [one + other for one, other in zip(ring(pieces, gpus - 1), ring(pieces, gpus - 1))]
    assert sent == [processes.all_reduced(weights, gpus)] * gpus


def test_what_is_computed_for_vit_large():
    """Against the paper: 2,735 GPU-hours, 626 steps an epoch of 2,048 of 1,281,167 images."""
    large = processes.large(link=50.0)
    assert large["weights"] == 304_326_632
    assert large["weights_in_mlps"] == 24 * (2 * 4 * 1024 * 1024 + 5 * 1024)
    assert large["gpu_seconds_per_step"] == pytest.approx(2735 * 3600 / (100 * 626))
    row = large["gpus"]["64"]
    assert row["images_per_gpu"] == 32 and row["compute_seconds"] == pytest.approx(2.4575, abs=1e-3)
    assert row["all_reduce_seconds"] == pytest.approx(2 * 63 / 64 * 304_326_632 * 4 / 50e9)


# --- Others ---


def test_loading(one_run, tmp_path, monkeypatch):
    monkeypatch.setattr(data, "GLYPHS", 128)
    images = write_parquet(tmp_path / "set", "train", range(6))
    small = "--count 4 --batch 2 --step-batch 1 --model glyphs --workers 0 --repetitions 2 --threads 1"
    record = one_run(data, f"--images {images} --label-column label {small}")
    assert record.config["images"] == 4 and record.results["file"]["pixels"] == 16 * 12
    assert len(record.history) == 2
    for pair, one in record.results["ratios"].items():
        above, below = pair.split(" / ")
        by_hand = [turn[above] / turn[below] for turn in record.history]
        assert [one["ratio_low"], one["ratio_high"]] == pytest.approx([min(by_hand), max(by_hand)])


def test_both_softmax_ways_compute_the_same_and_linear_attention_another():
    actions = linear_attention.make_actions(17, CPU)
    found = {name: action() for name, action in actions.items()}
    assert found["fused"].shape == (1, 3, 17, 64)
    assert torch.allclose(found["fused"], found["dense"], atol=1e-6)
    assert not torch.allclose(found["fused"], found["linear"], atol=1e-2)


# --- The script for a lent card, on a CPU


@pytest.mark.parametrize("small", [True, False])
def test_the_benchmarks_understand_their_commands(tmp_path, monkeypatch, small):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    options = on_a_gpu.parse(["--out", str(tmp_path), *["--small"] * small])
    for part in ("steps", "speeds", "profile", "resumed"):
        for script, *words in on_a_gpu.commands(part, options):
            parsed = import_module(Path(script).stem).parse(words)
            assert parsed.device == ("cpu" if small else "cuda") and parsed.out.parent == tmp_path
