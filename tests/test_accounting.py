"""What is transferred and what it costs: the paper's arithmetic, the activations themselves, and PyTorch's own FLOP counter."""

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from atlib import AttentionTransfer, Plan, create_vit, walk
from atlib.analysis import accounting
from atlib.analysis.accounting import MethodCost, method_costs, transferred_numbers
from tests.helpers import random_images, randomise

CONFIG = {"img_size": 24, "patch_size": 8, "embed_dim": 12, "depth": 4, "num_heads": 3, "num_classes": 5, "mlp_ratio": 3}
BATCH = 2
# PyTorch counts baddbmm, but not its in-place form, which the map-free loss uses: shapes (b, m, n), (b, m, k), (b, k, n).
ALSO = {torch.ops.aten.baddbmm_: lambda onto, left, right, out_shape=None, **_: 2 * left[0] * left[1] * left[2] * right[2]}


def vit(seed):
    """Attention written out, so that every matrix product is counted once."""
    made = create_vit(CONFIG)
    for block in made.blocks:
        block.attn.fused_attn = False
    return randomise(made, seed)


def test_the_papers_count_for_vit_large():
    with torch.device("meta"):
        numbers = transferred_numbers(create_vit("vit_large_patch16_224"))
    assert numbers.q + numbers.k == 24 * 16 * 197 * 64 * 2 == 9_682_944  # 9.7 M
    assert numbers.map == 24 * 16 * 197**2 == 14_902_656  # 15 M
    assert numbers.features == numbers.q == numbers.v == 24 * 197 * 1024


@pytest.mark.parametrize("config", [{}, {"reg_tokens": 3}, {"class_token": False, "global_pool": "avg"}])
def test_numbers_are_those_of_the_activations(config):
    model = create_vit({**CONFIG, **config})
    seen = walk(model, random_images(1, 3, 24, 24))
    numbers = transferred_numbers(model)
    for name in ("q", "k", "v", "map"):
        assert getattr(numbers, name) == sum(getattr(layer, name).numel() for layer in seen.layers)
    assert numbers.features == sum(tokens.numel() for tokens in seen.stream)


def test_numbers_of_a_vit_with_rotary_positions():
    with torch.device("meta"):
        numbers = transferred_numbers(create_vit("eva02_tiny_patch14_224"))
    assert numbers == (12 * 257 * 192, 12 * 257 * 192, 12 * 257 * 192, 12 * 3 * 257**2, 12 * 257 * 192)


def counted(module, backward):
    """FLOPs of the matrix products of one batch as PyTorch counts them."""
    images, labels = random_images(BATCH, 3, 24, 24), torch.tensor([0, 4])
    with FlopCounterMode(display=False, custom_mapping=ALSO) as counter, torch.set_grad_enabled(backward):
        output = module(images)
        if backward:
            logits, transfer_loss = output if isinstance(output, tuple) else (output, 0)
            (cross_entropy(logits, labels) + transfer_loss).backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("layers", [1, 3, 4])
def test_costs_against_the_flop_counter(layers):
    costs = {cost.method: cost for cost in method_costs(CONFIG, batch=BATCH, layers=layers)}
    assert list(costs) == ["scratch", "fine-tune", "copy", "distill"]
    again = BATCH * 3 * 2 * 10 * 4 * 10  # one product of shape (10, 4) by (4, 10), of three heads and two images
    plain, step = counted(vit(0).eval(), False), counted(vit(0).train(), True)
    for method in ("scratch", "fine-tune"):
        assert costs[method][1:3] == (step, plain)
    # what atlib does over again in order to store no map, by the module's own account
    copying = AttentionTransfer(vit(0), vit(1), Plan(how="copy", layers=range(layers)))
    assert counted(copying.train(), True) == costs["copy"].step_flops + (layers - 1) * again
    assert counted(copying.eval(), False) == costs["copy"].inference_flops + (layers - 1) * again
    distilling = AttentionTransfer(vit(0), vit(1), Plan(how="distill", layers=range(layers)))
    assert counted(distilling.train(), True) == costs["distill"].step_flops + (4 * layers - 1) * again
    assert costs["distill"].inference_flops == counted(distilling.student.eval(), False) == plain


def test_parameters_kept_are_those_of_the_models_that_inference_needs():
    costs = {cost.method: cost.parameters_kept for cost in method_costs("cifar-small")}
    teacher, student = create_vit("cifar-small"), create_vit("cifar-small")
    of_student = sum(value.numel() for value in student.state_dict().values())
    for how in ("copy", "distill"):
        pair = AttentionTransfer(teacher, student, Plan(how=how))
        of_teacher = sum(value.numel() for value in pair.teacher.state_dict().values()) if pair.needs_teacher else 0
        assert costs[how] == of_student + of_teacher
    assert costs["scratch"] == costs["fine-tune"] == of_student


def test_costs_of_vit_large():
    costs = {cost.method: cost for cost in method_costs("vit_large_patch16_224", batch=1)}
    # twice the multiply-adds that timm publishes for this model, 61.6 G, less the norms and element-wise work
    assert costs["fine-tune"].inference_flops == pytest.approx(2 * 61.6e9, rel=0.01)
    assert costs["fine-tune"].parameters_kept == 304_326_632
    assert costs["distill"].step_flops > costs["fine-tune"].step_flops
    assert method_costs("vit_large_patch16_224", batch=64)[2] == MethodCost(
        "copy", 64 * costs["copy"].step_flops, 64 * costs["copy"].inference_flops, costs["copy"].parameters_kept)
    larger = method_costs("vit_large_patch16_224", image_size=448)[1]
    assert larger.inference_flops > 4 * costs["fine-tune"].inference_flops, "attention grows with the square of the tokens"


def test_what_cannot_be_counted_is_refused():
    for bad in (dict(batch=0), dict(layers=0), dict(layers=5)):
        with pytest.raises(ValueError, match="depth of this ViT"):
            method_costs(CONFIG, **bad)
    with pytest.raises(ValueError, match="its class"):
        method_costs("eva02_tiny_patch14_224")
    with pytest.raises(ValueError, match="attention pooling"):
        accounting.shape_of(create_vit({**CONFIG, "global_pool": "map"}))
