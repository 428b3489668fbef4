"""The benchmark of transfer steps: its FLOP counts, its memory counts, its dense baseline, its arithmetic,
and one small run."""

import json
from functools import partial

import flops
import loss_alone
import methods
import pytest
import targets
import timing
import torch
import transfer_step
from dense_baseline import DenseTransfer, dense_forward
from memory import peak_allocated
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from atbook.records import read_file
from atlib import AttentionTransfer, Plan, create_vit, walk
from atlib.attention import Instead, find_projections
from atlib.train import make_optimizer
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


def test_shape_is_read_off_the_model():
    assert flops.shape_of(vit()) == flops.Shape(
        tokens=10, patches=9, depth=4, width=12, hidden=36, pixels=192, classes=5
    )
    assert flops.shape_of(create_vit("glyphs", num_classes=0)).classes == 0


def test_flops_of_the_plain_model(images):
    model = vit()
    shape = flops.shape_of(model)
    spent, _ = forward_flops(lambda: model(images))
    assert spent == shape.embed + shape.depth * shape.block + shape.head
    assert both_ways(lambda: model(images)) == flops.fine_tuning(shape)


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


def test_flops_of_query_copy(images):
    teacher, student = vit(1), vit(2)
    shape = flops.shape_of(student)
    before_last, stopped = forward_flops(sparing_walk(teacher, images, stop_after=3))
    only_q = before_last - shape.projection  # the walk makes k as well
    copied = sparing_walk(
        student, images, replace={i: Instead(q=one.q) for i, one in enumerate(stopped.layers)}
    )
    spent = only_q + both_ways(lambda: copied().logits)
    # Fused attention makes maps once more in the backward pass, and the gradient of q, which nobody reads.
    assert spent == flops.query_copy(shape) + 2 * shape.depth * shape.mixing


def test_flops_of_feature_distillation(images):
    teacher, student = vit(1), vit(2)
    shape = flops.shape_of(student)
    spent, _ = forward_flops(lambda: teacher.forward_features(images))
    assert spent + both_ways(lambda: student(images)) == flops.feature_distillation(shape)


def test_flops_of_projected_features(images):
    """For each pair of layers a product forward and two backward."""
    shape, wide = flops.shape_of(vit()), flops.shape_of(vit())._replace(width=20)
    projector = torch.nn.Linear(shape.width, 20, bias=False)
    stream = torch.zeros(BATCH, shape.tokens, shape.width, requires_grad=True)
    spent = both_ways(lambda: projector(stream).sum())
    without = flops.feature_distillation(shape, 2, wide)
    assert without == flops.fine_tuning(shape) + wide.embed + 2 * wide.block
    assert flops.feature_distillation(shape, 2, wide, projectors=3) == without + 3 * spent


def test_products_that_are_added_in_place_are_counted():
    """A (5, 7, 2) by (5, 2, 3) product added to a sum: 2 · 5 · 7 · 2 · 3 operations in either form, and the
    same in a matrix product."""
    onto, left, right = torch.zeros(5, 7, 3), torch.ones(5, 7, 2), torch.ones(5, 2, 3)
    for action in (
        lambda: onto.baddbmm_(left, right),
        lambda: torch.baddbmm(onto, left, right),
        lambda: left @ right,
    ):
        with flops.counter() as counted:
            action()
        assert counted.get_total_flops() == 2 * 5 * 7 * 2 * 3


@pytest.mark.parametrize("layers", [1, 3])
def test_what_a_step_of_distill_really_does(layers):
    """Beyond the fewest, the loss makes both maps again and two gradients in each of its layers: four
    products. One of them all is among the fewest: the teacher stops before it has made its last layer's map.
    The student's attention is fused, which makes each map once more in the backward pass."""
    images, shape = random_images(BATCH, 3, 24, 24), flops.shape_of(vit())
    module = AttentionTransfer(vit(1), vit(2), Plan(how="distill", layers=range(layers))).train()
    optimizer = make_optimizer(module.student, methods.RECIPE)
    step = methods.Step(module.student, module.teacher, optimizer, images, torch.tensor([0, 4]), False)
    assert transfer_step.count_flops(step, module) == BATCH * (
        flops.distill(shape, layers) + (4 * layers - 1 + shape.depth) * shape.mixing
    )


def test_dense_baseline_runs_the_whole_teacher_and_all_projections(images):
    shape = flops.shape_of(vit())
    whole_teacher = shape.embed + shape.depth * shape.block + shape.head
    distill = DenseTransfer(vit(1), vit(2), "distill", range(3))
    copy = DenseTransfer(vit(1), vit(2), "copy", range(4))
    whole = whole_teacher + flops.fine_tuning(shape)
    assert both_ways(lambda: sum(part.sum() for part in distill(images))) == whole
    assert both_ways(lambda: copy(images).logits) == whole - 4 * 4 * shape.mixing


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


def test_dense_losses_of_the_loss_alone_agree():
    actions = loss_alone.make_actions(2, 3, 7, 4, CPU, torch.float32)
    assert set(actions) == set(loss_alone.LOSSES)
    values = {name: action() for name, action in actions.items()}
    assert values["dense"] > 0
    assert values["map-free"] == pytest.approx(values["dense"], rel=1e-5)


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


def test_memory_of_a_matrix_product_and_its_backward_pass():
    weight = torch.ones(300, 400, requires_grad=True)
    x = torch.ones(50, 300)
    # y is held by nobody after the square; d/dy and the gradient of the weight are the peak, each float four
    # bytes
    peak = peak_allocated(lambda: (x @ weight).sum().backward(), CPU)
    assert peak >= 4 * 300 * 400
    assert peak <= 4 * (300 * 400 + 3 * 50 * 400) + 64


def test_ratios_are_taken_within_a_repetition():
    rounds = [{"a": 1.0, "b": 2.0}, {"a": 10.0, "b": 30.0}, {"a": 2.0, "b": 3.0}]
    assert timing.ratio(rounds, "b", "a") == {"ratio": 2.0, "ratio_low": 1.5, "ratio_high": 3.0}
    assert timing.spread(rounds, "a") == {"seconds": 2.0, "seconds_min": 1.0}


def test_interleaving_runs_everything_once_per_repetition():
    order = []
    rounds = timing.interleave({name: lambda name=name: order.append(name) for name in "abc"}, 2)
    assert order == list("abcabc")
    assert [list(one) for one in rounds] == [list("abc")] * 2
    assert all(value >= 0 for one in rounds for value in one.values())


def test_targets_say_by_how_much_they_are_missed():
    figures = {
        "distill_step": 1.408,
        "copy_step": 1.15,
        "distill_memory": 1.0,
        "dense_step_197": 1.0,
        "loss_memory_growth": 9.0,
    }
    compared = targets.compare(figures, 197, "cpu")
    assert compared["distill_step"] == {
        "wanted": 1.28,
        "found": 1.408,
        "hit": False,
        "missed_by": pytest.approx(0.1),
    }
    assert compared["copy_step"]["hit"] and compared["distill_memory"]["missed_by"] == 0
    assert compared["dense_step_197"]["missed_by"] == pytest.approx(0.10)
    assert compared["loss_memory_growth"]["missed_by"] == pytest.approx(1.0)
    assert "missed by 10.0%" in next(targets.describe(compared))
    figures = {"dense_step_785": 6.1, "loss_memory_growth": 4}
    assert set(targets.compare(figures, 785, "cuda")) == set(figures)


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


@pytest.mark.parametrize(
    "arguments", ["--model huge", "--tokens 200", "--batch 0", "--repetitions 0", "--device cuda"]
)
def test_bad_arguments_are_refused(arguments, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        transfer_step.parse(arguments.split())
    assert arguments.split()[0] in capsys.readouterr().err.splitlines()[-1], "above it is the usage"


def test_records_of_other_precisions_have_their_own_name():
    names = [transfer_step.name_of(transfer_step.parse(["--dtype", dtype])) for dtype in ("float32", "bf16")]
    assert names == ["transfer_step-base-197-cpu", "transfer_step-base-197-cpu-bf16"]
