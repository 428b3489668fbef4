"""On a CUDA device: what the CPU computes, in float32 the same numbers; half precision trains; students come
back. Skipped where there is none: no gate of this project has one."""

import copy
import math

import pytest
import torch
from torch import nn

from atbook.lab import scales
from atbook.worlds import glyph_images, glyphs
from atfamily.token_distillation import TokenDistillation
from atlib import AttentionTransfer, MapCache, Plan, walk
from atlib.attention import FORBIDDEN, Seen
from atlib.baselines import FeatureDistillation
from atlib.data import Images, crop_and_flip
from atlib.evaluate import predict
from atlib.losses import dense_attention_cross_entropy
from atlib.map_free import by_blocks, by_fused_attention, map_free_cross_entropy
from atlib.recipe import Recipe
from atlib.train import train
from atlib.vit import create_vit
from atrun.record import about, peak_memory_mb
from tests.helpers import randomise, tiny

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")

RECIPE = Recipe(steps=4, batch_size=16, lr=1e-3, warmup=0.0)


def images(number=64):
    return glyph_images(glyphs.generate("train", number)).with_augment(crop_and_flip(2))


def vit(seed=0, **options):
    return randomise(tiny(seed, **options), seed)


def weights(model):
    return nn.utils.parameters_to_vector(model.parameters()).detach().cpu()


def apart(left, right):
    return ((left - right).norm() / right.norm()).item()


def test_a_walk_sees_what_it_sees_on_the_cpu():
    model, (batch, _) = vit(), images().take(range(16))
    with torch.no_grad():
        expected, seen = walk(model, batch), walk(copy.deepcopy(model).cuda(), batch.cuda())
    assert seen.logits.is_cuda
    torch.testing.assert_close(seen.logits.cpu(), expected.logits, rtol=1e-3, atol=1e-4)
    for here, there in zip(seen.layers, expected.layers):
        torch.testing.assert_close(here.map.cpu(), there.map, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    "dtype, within", [(torch.float64, 1e-9), (torch.float32, 1e-4), (torch.bfloat16, 3e-2)]
)
def test_the_loss_without_maps_and_its_gradients(dtype, within):
    """Against the loss written out with maps, in float64 on the CPU."""
    student, teacher, (batch, _) = vit(0), vit(1), images().take(range(8))
    of = {
        name: walk(model.double(), batch.double(), head=False).layers[1]
        for name, model in (("student", student), ("teacher", teacher))
    }
    q, k = (of["student"].q.detach().requires_grad_(), of["student"].k.detach().requires_grad_())
    logs = (of["student"].scale * q @ k.transpose(-2, -1)).log_softmax(-1)
    expected = -(of["teacher"].map.detach() * logs).sum(-1).mean()
    expected.backward()
    for compute in (map_free_cross_entropy, by_blocks, by_fused_attention):
        if compute is by_fused_attention and dtype == torch.float64:
            continue  # no fused kernel knows it
        own = [part.detach().to("cuda", dtype).requires_grad_() for part in (q, k)]
        theirs = of["teacher"]._replace(
            q=of["teacher"].q.detach().to("cuda", dtype), k=of["teacher"].k.detach().to("cuda", dtype)
        )
        loss = compute(of["student"]._replace(q=own[0], k=own[1]), theirs)
        loss.backward()
        assert math.isclose(loss.item(), expected.item(), rel_tol=within)
        for part, wanted in zip(own, (q.grad, k.grad)):
            assert apart(part.grad.cpu().double(), wanted) < 3 * within


# What rounding to a type may do to a gradient, as a share of its norm; TF32 is off.
WITHIN = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
# N and the widths of heads, one of every cut: on an H200 another cut of 16 queries and 256 keys, which is not
# taken, ended in an illegal access.
SHAPES = [(16, 64, 64), (17, 64, 64), (50, 24, 32), (50, 64, 64), (100, 64, 64)]
SHAPES += [(197, 64, 64), (197, 128, 64), (785, 64, 72)]


@pytest.mark.parametrize("added", ["nothing", "bias", "mask"])
@pytest.mark.parametrize("dtype", WITHIN, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_equals_the_dense_loss(shape, dtype, added):
    """The loss, which is in float32 however q and k are rounded, and its gradients: against float64."""
    kernels = pytest.importorskip("atlib.fused")
    N, d, d_t = shape
    generator = torch.Generator().manual_seed(N)
    q, k, q_t, k_t = (torch.randn(4, 3, N, n, generator=generator).to(dtype) for n in (d, d, d_t, d_t))
    extra = {
        "nothing": {},
        "bias": {"bias": torch.randn(3, N, N, generator=generator)},
        "mask": {"mask": torch.where(torch.rand(N, N, generator=generator) < 0.1, FORBIDDEN, 0.0)},
    }[added]

    def stepped(how, device, dtype):
        own = [x.to(device, dtype, copy=True).requires_grad_() for x in (q, k)]
        student, teacher = (
            Seen(*pair, None, n**-0.5, **{name: x.to(device) for name, x in extra.items()})
            for pair, n in ((own, d), ((q_t.to(device, dtype), k_t.to(device, dtype)), d_t))
        )
        loss = how(student, teacher)
        (4096 * loss).backward()  # as an fp16 run scales it: below 6e-5 its numbers lose digits
        return loss.detach().cpu().double(), *(x.grad.cpu().double() / 4096 for x in own)

    expected = stepped(
        lambda *pair: dense_attention_cross_entropy(*([one] for one in pair)), "cpu", torch.float64
    )
    computed = stepped(kernels.by_kernel, "cuda", dtype)
    assert abs(computed[0] - expected[0]) < 1e-5
    for one, other in zip(computed[1:], expected[1:]):
        assert apart(one, other) < WITHIN[dtype]
    again = stepped(map_free_cross_entropy, "cuda", dtype)  # which takes the kernel, and gives the same bits
    assert all(map(torch.equal, again, computed))


@pytest.mark.parametrize("N", [197, 785])
def test_the_kernel_compiled_into_a_step(N):
    """By the default compiler, forward and backward: the numbers of the plain call."""
    kernels = pytest.importorskip("atlib.fused")
    results = []
    for call in (kernels.by_kernel, torch.compile(kernels.by_kernel, fullgraph=True)):
        torch.manual_seed(0)
        joint, q_t, k_t = (
            torch.randn(shape, device="cuda", dtype=torch.bfloat16)
            for shape in ((2, N, 2, 3, 64), *[(2, 3, N, 64)] * 2)
        )
        q, k = joint.requires_grad_().permute(2, 0, 3, 1, 4)
        loss = call(Seen(q, k, None, 0.125), Seen(q_t, k_t, None, 0.125))
        loss.backward()
        results.append((loss.detach().double(), joint.grad.double()))
    assert abs(results[0][0] - results[1][0]) < 1e-5 and apart(results[1][1], results[0][1]) < 1e-2


@pytest.mark.parametrize("how", ["copy", "distill"])
def test_a_run_ends_where_it_ends_on_the_cpu(how):
    ends = {}
    for cpu in (True, False):
        pair = AttentionTransfer(vit(1), tiny(), Plan(how=how))
        history = train(pair, images(), RECIPE, progress=None, cpu=cpu)
        assert {parameter.device.type for parameter in pair.student.parameters()} == {"cpu"}
        ends[cpu] = weights(pair.student), history[-1]["loss"]
    assert apart(ends[False][0], ends[True][0]) < 1e-2
    assert math.isclose(ends[False][1], ends[True][1], rel_tol=1e-3)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("how", ["copy", "distill"])
def test_half_precision_learns(how, precision):
    pair, data = AttentionTransfer(vit(1), tiny(), Plan(how=how)), images(16)
    recipe = Recipe(steps=40, batch_size=16, lr=3e-3, warmup=0.0, mixed_precision=precision)
    losses = []
    train(pair, data, recipe, progress=None, log=lambda e: e["event"] == "step" and losses.append(e["loss"]))
    assert all(map(math.isfinite, losses)) and losses[-1] < losses[0] - 0.05


def test_a_compiled_model_trains():
    pair = AttentionTransfer(vit(1), tiny(), Plan(how="distill"))
    (entry,) = train(pair, images(), RECIPE, progress=None)[:1]
    compiled = AttentionTransfer(vit(1), tiny(), Plan(how="distill"))
    (same,) = train(compiled, images(), Recipe(**{**RECIPE.describe(), "compile": True}), progress=None)[:1]
    assert math.isclose(same["loss"], entry["loss"], rel_tol=1e-2)


@pytest.mark.parametrize("method", [FeatureDistillation, TokenDistillation])
def test_what_else_is_distilled(method):
    pair = method(vit(1), tiny())
    history = train(pair, images(), RECIPE, progress=None)
    assert math.isfinite(history[-1]["loss"])


def test_images_have_the_bits_that_they_have_on_the_cpu():
    """Stored maps are found by them: a GPU divides by a number otherwise than a CPU."""
    pixels = torch.arange(256, dtype=torch.uint8).expand(2, 3, 4, 256).contiguous()
    data = Images(pixels, torch.zeros(2), mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    assert torch.equal(data.to("cuda").take([0, 1])[0].cpu(), data.take([0, 1])[0])


def test_stored_maps_are_where_the_images_are(tmp_path):
    teacher, (batch, _) = vit(1), images().take(range(8))
    cache = MapCache(tmp_path, teacher.cuda())
    assert cache.add(batch.cuda()) == 8 and cache.add(batch) == 0
    given = cache(batch.cuda())
    with torch.no_grad():
        seen = walk(teacher, batch.cuda(), head=False).layers
    for layer, maps in given.items():
        assert maps.is_cuda
        torch.testing.assert_close(maps, seen[layer].map, rtol=2e-3, atol=1e-4)


def test_predictions_are_those_of_the_cpu():
    model, data = vit(), images()
    expected = predict(model, data)
    on_device = predict(copy.deepcopy(model).cuda(), data)
    torch.testing.assert_close(on_device.cpu(), expected, rtol=1e-3, atol=1e-3)


def test_a_record_names_the_device_and_counts_its_memory():
    assert about("cuda")["device"] == torch.cuda.get_device_name()
    held = torch.zeros(50_000_000, device="cuda")  # 200 MB
    assert 200 <= peak_memory_mb() < 80_000
    del held


def test_experiments_train_on_it():
    assert scales.place_of_training() == "cuda"


def test_a_large_vit_teaches_in_half_precision():
    """ViT-B with 197 tokens: the loss stays as near to float32's as bf16 lets it, and no map is written out:
    12 of them, of 16 images, would be 270 MB a piece in float32."""
    with torch.device("cuda"):
        teacher, student = (create_vit("vit_base_patch16_224", num_classes=10) for _ in range(2))
    batch = torch.randn(16, 3, 224, 224, device="cuda")
    pair = AttentionTransfer(teacher, student, Plan(how="distill")).train()
    with torch.no_grad():
        exact = pair(batch).transfer_loss.item()
    with torch.autocast("cuda", torch.bfloat16):
        loss = pair(batch).transfer_loss
    loss.backward()
    assert math.isclose(loss.item(), exact, rel_tol=1e-2)
    assert all(p.grad is None or p.grad.isfinite().all() for p in student.parameters())
