"""The teacher's weights under autocast: cast once in a run, the same bits as where every step casts them."""

import copy
import pickle
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from atlib import AttentionTransfer, Plan
from atlib.baselines import FeatureDistillation
from atlib.cast_once import CastOnce
from atlib.recipe import Recipe
from atlib.train import train
from tests.helpers import randomise, same, state_of, tiny

BF16 = Recipe(steps=4, batch_size=16, mixed_precision="bf16")
CPU = torch.device("cpu")


class Casts(TorchDispatchMode):
    """Counts how often each of a teacher's weights is cast to bf16, by name."""

    def __init__(self, teacher):
        super().__init__()
        self.names = {weight.data_ptr(): name for name, weight in teacher.named_parameters()}
        self.counted = Counter()

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **options or {})
        casts = torch.ops.aten._to_copy.default, torch.ops.aten.to.dtype  # inference mode leaves `to` whole
        if function in casts and result.dtype == torch.bfloat16 != arguments[0].dtype:
            self.counted[self.names.get(arguments[0].data_ptr())] += 1
        return result


def distilling(how="distill", **options):
    return AttentionTransfer(randomise(tiny(1, **options)), tiny(2, **options), Plan(how=how))


def trained(data, pair, recipe=BF16, **options):
    history = train(pair, data, recipe, progress=None, cpu=True, **options)
    return state_of(pair), [entry["loss"] for entry in history]


def test_a_run_casts_each_weight_once(glyphs64):
    pair = distilling()
    with Casts(pair.teacher) as casts:
        trained(glyphs64, pair)
    del casts.counted[None]  # of the student, of images
    some = {"patch_embed.proj.weight", "blocks.0.mlp.fc2.bias", "blocks.1.attn.qkv.weight"}
    assert some <= casts.counted.keys() and set(casts.counted.values()) == {1}


@pytest.mark.parametrize(
    "pair",
    [
        distilling,
        lambda: distilling("copy"),
        lambda: distilling(class_token=False, global_pool="avg", init_values=0.1),
        lambda: FeatureDistillation(tiny(1), tiny(2), [0, 1]),
    ],
    ids=["distill", "copy", "no class token", "features"],
)
def test_the_bits_are_autocasts(glyphs64, monkeypatch, pair):
    recipe = replace(BF16, accumulate=2)
    weights, losses = trained(glyphs64, pair(), recipe)
    monkeypatch.setattr(CastOnce, "in_use", lambda self, device: nullcontext())
    expected, losses_cast_each_step = trained(glyphs64, pair(), recipe)
    assert losses == losses_cast_each_step and same(weights, expected)


def test_a_teacher_that_begins_with_a_linear_layer_is_shown_float32():
    pair, images = distilling(), torch.randn(2, 3, 32, 32)
    pair.teacher._parameters.clear()  # its token and positions: the patches' convolution is then the first
    with torch.autocast("cpu", torch.bfloat16), CastOnce(pair).in_use(CPU):
        assert pair.for_teacher(images) is images
        assert pair.teacher.blocks[0].mlp.fc1.weight.dtype == torch.bfloat16


def test_the_callers_teacher_stays_as_it_is(glyphs64):
    pair, seen = distilling(), []
    weights, before = dict(pair.teacher.named_parameters()), state_of(pair.teacher)

    def look(pair):
        seen.append(copy.deepcopy(pair))
        seen.append(pickle.loads(pickle.dumps(pair)))
        return {}

    trained(glyphs64, pair, evaluate=look, evaluate_every=1)
    for one in (pair, *seen):
        assert same(state_of(one.teacher), before)
        assert {weight.dtype for weight in one.teacher.parameters()} == {torch.float32}
    assert all(weight is weights[name] for name, weight in pair.teacher.named_parameters())
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    assert pair.double()(images).transfer_loss.dtype == torch.float64


def test_an_error_within_a_step_leaves_the_teacher_in_float32(glyphs64):
    pair, dtypes = distilling(), []

    def failing(model, images, targets, recipe):
        dtypes.append(pair.teacher.blocks[0].mlp.fc1.weight.dtype)
        raise KeyError("a loss")

    with pytest.raises(KeyError):
        trained(glyphs64, pair, loss=failing)
    assert dtypes == [torch.bfloat16]
    assert {weight.dtype for weight in pair.teacher.parameters()} == {torch.float32}


def test_a_weight_that_changed_is_cast_again():
    teacher = randomise(tiny(1))
    pair = AttentionTransfer(teacher, tiny(2), Plan(how="distill"))
    once, layer, cast = CastOnce(pair), teacher.blocks[0].mlp.fc1, []

    def look():
        with torch.autocast("cpu", torch.bfloat16), once.in_use(CPU):
            cast.append(layer.weight)
        assert torch.equal(cast[-1], layer.weight.bfloat16())

    look()
    look()
    assert cast[0] is cast[1]
    with torch.no_grad():
        layer.weight.mul_(2)
    look()
    teacher.load_state_dict(tiny(3).state_dict())
    look()
    layer.weight = torch.nn.Parameter(layer.weight.detach() + 1)
    look()
    layer.weight.data = layer.weight.detach() * 3
    look()
    teacher.double()
    with torch.autocast("cpu", torch.bfloat16), once.in_use(CPU):
        assert layer.weight.dtype == torch.float64
