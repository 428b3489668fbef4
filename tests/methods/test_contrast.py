"""Learning by contrast: the published losses, gradients and schedules; what follows, how a run goes on."""

import math

import pytest
import timm
import torch
from safetensors.torch import load_file
from torch import nn

from atbook.worlds import glyph_images, glyphs
from atfamily.contrast import Dino, MoCo, contrast_loss, draw_patches, momentum_at, unmatched
from atlib import create_vit
from atlib.recipe import Recipe
from atlib.train import make_optimizer, set_weight_decay, train
from atrun.checkpoint_manager import CheckpointManager
from atrun.data.views import looks, small_views
from tests.helpers import ROOT, random_images, same, state_of

SHAPE = {"img_size": 16, "patch_size": 4, "depth": 2, "embed_dim": 12, "num_heads": 3, "num_classes": 0}
VIEWS = random_images(3, 4, 3, 32, 32, dtype=torch.float64)
SMALL_HEAD = {"outputs": 10, "hidden": 16, "bottleneck": 6}


def images(count=40, local=0):
    drawn = glyph_images(glyphs.generate("train", count))
    return drawn.with_augment(small_views(looks((0.2, 1.0), local)))


def moco(small_vit, **options):
    return MoCo(small_vit(num_classes=0), **({"projection": 8, "hidden": 16} | options))


def dino(small_vit, vit=None, **options):
    return Dino(small_vit(num_classes=0, **(vit or {})), **SMALL_HEAD | options)


# --- The published code


def golden(name):
    return load_file(ROOT / "tests" / "golden" / f"{name}.safetensors")


def part_of(tensors, prefix):
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def step_of(model, views):
    """One step of SGD on the model's loss: the loss."""
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    for weight in trained:
        weight.grad = None
    loss = model(views.double())
    loss.backward()
    with torch.no_grad():
        for weight in trained:
            weight -= 0.1 * weight.grad
    return loss.item()


def largest_difference(gradient, expected):
    assert expected.abs().max() > 1e-3
    return (gradient - expected).abs().max().item()


def test_moco_is_the_published_code():
    published = golden("moco_v3")
    encoder = part_of(published, "encoder.")
    # timm's own epsilon, as the published class was built here
    model = MoCo(create_vit(SHAPE), projection=8, hidden=16, temperature=0.2, momentum=0.9)
    own = {name: value for name, value in encoder.items() if not name.startswith("head.")}
    for vit in (model.vit, model.momentum_vit):
        vit.load_state_dict(own)
    for projector in (model.projector, model.momentum_projector):
        projector.load_state_dict(part_of(encoder, "head."))
    model.predictor.load_state_dict(part_of(published, "predictor."))
    model.double()
    for step, views in enumerate(published["views"]):
        assert momentum_at(step / 10, 0.9) == pytest.approx(published[f"momentum{step}"].item(), abs=1e-12)
        assert abs(step_of(model, views) - published[f"loss{step}"].item()) <= 1e-10
        found = {"qkv": model.vit.blocks[1].attn.qkv.weight, "predictor": model.predictor[0].weight}
        for name, weight in found.items():
            assert largest_difference(weight.grad, published[f"grad{step}.{name}"]) <= 1e-10, name
        if step == 1:
            followed = model.momentum_vit.blocks[1].attn.qkv.weight
            assert (followed - published["momentum_qkv"]).abs().max() <= 1e-12
        model.follow(step + 1, 10)
    assert model.vit.patch_embed.proj.weight.grad is None


@pytest.mark.parametrize("lengths", [False, True])
def test_dino_is_the_published_code(lengths):
    published, tag = golden("dino"), "lengths." * lengths
    options = {"teacher_temperature": (0.2, 0.2), "momentum": 0.9, "frozen": 0.0, "lengths": lengths}
    model = Dino(create_vit(SHAPE), **SMALL_HEAD, **options)
    head = part_of(published, "head.")
    for vit, own in ((model.vit, model.head), (model.momentum_vit, model.momentum_head)):
        vit.load_state_dict(part_of(published, "backbone."))
        own.mlp.load_state_dict(part_of(head, "mlp."))
        with torch.no_grad():
            own.prototypes.directions.copy_(head["last_layer.weight_v"])
            own.prototypes.lengths.copy_(head["last_layer.weight_g"])
    model.double()
    for step, views in enumerate(published["views"]):
        assert abs(step_of(model, views) - published[f"{tag}loss{step}"].item()) <= 1e-10
        prototypes = model.head.prototypes
        found = {"qkv": model.vit.blocks[1].attn.qkv.weight, "directions": prototypes.directions}
        found |= {"lengths": prototypes.lengths} if lengths else {}
        for name, weight in found.items():
            assert largest_difference(weight.grad, published[f"{tag}grad{step}.{name}"]) <= 1e-9, name
        model.follow(step + 1, 10)
    assert (model.centre - published[f"{tag}centre"]).abs().max() <= 1e-10
    followed = model.momentum_vit.blocks[1].attn.qkv.weight
    assert (followed - published[f"{tag}teacher_qkv"]).abs().max() <= 1e-10


def test_schedules_are_the_published_ones():
    published = golden("dino")
    found = [momentum_at(step / 10, 0.9) for step in range(10)]
    assert found == pytest.approx(published["momenta"].tolist(), abs=1e-12)
    assert momentum_at(1.0, 0.9) == 1
    recipe = Recipe(steps=10, weight_decay=0.04, weight_decay_end=0.4)
    optimizer = make_optimizer(nn.Linear(3, 3), recipe)
    decays = []
    for step in range(10):
        set_weight_decay(optimizer, step, recipe)
        decays.append(max(group["weight_decay"] for group in optimizer.param_groups))
        assert min(group["weight_decay"] for group in optimizer.param_groups) == 0, "biases never decay"
    assert decays == pytest.approx(published["decays"].tolist(), abs=1e-12)


# --- What follows


def test_running_means_are_taken_over():
    """A copy in eval mode that kept those of its first day would normalise by 0 and 1."""
    model = Dino(timm.create_model("resnet10t", num_classes=0), **SMALL_HEAD).train()
    model(VIEWS.float()).backward()
    model.follow(1, 10)
    for name, buffer in model.vit.named_buffers():
        assert torch.equal(model.momentum_vit.get_buffer(name), buffer)
    assert model.momentum_vit.bn1.running_mean.abs().max() > 0


def test_the_copy_is_never_in_training_mode(small_vit):
    model = dino(small_vit, {"drop_path_rate": 0.5}).train()
    assert model.vit.training and not any(part.training for part in model.momentum_vit.modules())


def test_patches_stay_as_they_were_drawn(small_vit):
    vit = draw_patches(small_vit(num_classes=0))
    bound = math.sqrt(6 / (3 * 64 + 24))
    weight = vit.patch_embed.proj.weight
    assert 0.95 * bound < weight.abs().max() <= bound and not vit.patch_embed.proj.bias.any()
    before, model = weight.clone(), MoCo(vit, projection=8, hidden=16)
    others = vit.blocks[0].attn.qkv.weight.clone()
    train(model, images(), Recipe(steps=3, batch_size=16), loss=contrast_loss, progress=None)
    assert torch.equal(vit.patch_embed.proj.weight, before)
    assert not torch.equal(vit.blocks[0].attn.qkv.weight, others)


def test_small_views_at_their_own_size(small_vit):
    model = dino(small_vit, {"dynamic_img_size": True}, local_size=16)
    sizes = []
    model.vit.patch_embed.register_forward_hook(lambda part, given, made: sizes.append(given[0].shape))
    model(VIEWS.float())
    assert [tuple(size) for size in sizes] == [(6, 3, 32, 32), (6, 3, 16, 16)]
    said = model.said.clone()
    model.eval()(VIEWS.float())
    assert said.any() and torch.equal(model.said, said), "an evaluation does not move the centre"


def test_the_teachers_temperature_rises(small_vit):
    model = dino(small_vit, teacher_temperature=(0.04, 0.07), temperature_warmup=0.3)
    for done, expected in ((0, 0.04), (15, 0.055), (30, 0.07), (90, 0.07)):
        model.done.fill_(done / 100)
        assert model.temperature_of_teacher().item() == pytest.approx(expected, abs=1e-6)
    assert dino(small_vit).temperature_of_teacher().item() == pytest.approx(0.04)


def test_the_last_layer_is_frozen_at_first(small_vit):
    model = dino(small_vit, frozen=0.1)
    for done, moves in ((0.0, False), (0.09, False), (0.11, True)):
        model.done.fill_(done)
        model.zero_grad()
        model(VIEWS.float()).backward()
        gradient = model.head.prototypes.directions.grad
        assert bool(gradient.any()) is moves and model.head.mlp[0].weight.grad.any()


# --- Runs


@pytest.mark.parametrize("build, local", [(moco, 0), (dino, 2)])
def test_a_run_that_was_stopped_goes_on_with_the_same_bits(small_vit, tmp_path, build, local):
    recipe = Recipe(steps=7, batch_size=16, weight_decay_end=0.4)

    def run(**options):
        torch.manual_seed(4)
        model = build(small_vit)
        history = train(model, images(local=local), recipe, loss=contrast_loss, progress=None, **options)
        return state_of(model), history

    whole = run()
    run(keeper=CheckpointManager(tmp_path, every=2), stop_at=4)
    pieces = run(keeper=CheckpointManager(tmp_path, every=2))
    assert same(whole[0], pieces[0]) and whole[1] == pieces[1]
    assert whole[0]["done"] == 1


def test_accumulated_dino_is_dino(small_vit):
    def run(accumulate):
        torch.manual_seed(4)
        model = dino(small_vit).double()
        data = images()
        scaled = data._scaled
        data._scaled = lambda pixels: scaled(pixels).double()
        recipe = Recipe(steps=4, batch_size=16, accumulate=accumulate)
        train(model, data, recipe, loss=contrast_loss, progress=None)
        return state_of(model)

    once, parts = run(1), run(3)
    assert max((once[name] - parts[name]).abs().max().item() for name in once) <= 1e-9


def test_unmatched_by_hand(small_vit):
    """Views that are the same image are nearest to each other; and the model is left as it was."""
    model = moco(small_vit).train()
    data = glyph_images(glyphs.generate("train", 20))
    twice = data.with_augment(lambda pixels, seeds: torch.stack([pixels, pixels], 1))
    assert unmatched(model, twice) == 0.0 and model.training
    turned = data.with_augment(lambda pixels, seeds: torch.stack([pixels, pixels.roll(1, 0)], 1))
    assert unmatched(model, turned) == 1.0
