"""The same for the notebooks on methods: what 04, 05 and 06 write out is what atlib computes, on other inputs
than theirs."""

from dataclasses import replace

import pytest
import torch

from atlib import AttentionTransfer, Plan, walk
from atlib.losses import attention_cross_entropy
from atlib.recipe import Recipe
from atlib.train import make_optimizer
from tests.book.test_taught import small_vit as vit
from tests.book.test_taught import taught


def test_layer_decay_is_timms():
    model = vit(0, depth=5)
    optimizer = make_optimizer(model, replace(Recipe(), lr=1.0, layer_decay=0.6))
    expected = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    names = [name for name, _ in model.named_parameters()]
    factors = taught("../book/recipes").learning_rate_factors(names, 5, 0.6)
    for name, parameter in model.named_parameters():
        assert factors[name] == pytest.approx(expected[id(parameter)]), name


def test_copy_forward_is_attention_transfer():
    teacher, student, images = vit(1, num_classes=2), vit(2), torch.randn(3, 3, 32, 32)
    expected = AttentionTransfer(teacher, student, Plan(how="copy"))(images).logits
    logits = taught("03-copy").copy_forward(teacher, student, images)
    assert (logits - expected).abs().max() < 1e-5


def test_cross_entropy_by_hand_is_the_loss():
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        student, teacher = walk(vit(3), images).layers, walk(vit(4), images).layers
    maps = ([seen.map for seen in layers] for layers in (student, teacher))
    loss = taught("06-attention-distillation").attention_cross_entropy_by_hand(*maps)
    assert loss == pytest.approx(attention_cross_entropy(student, teacher).item(), rel=1e-5)
