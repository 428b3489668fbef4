"""Both losses of AttnDistill against matrices and loops, and where gradients go."""

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from atfamily.attndistill import AttnDistill, pool_heads, row_squared_error
from atlib.maps import resample_class_attention
from tests import longhand
from tests.helpers import random_images, random_maps, randomise

LABELS = torch.tensor([0, 3, 1])
IMAGES = random_images(3, 3, 32, 32, dtype=torch.float64)
PAIRS = {  # the teacher's options, the student's
    "alike": ({}, {}),
    "smaller teacher": ({"embed_dim": 12, "depth": 1, "num_heads": 2, "num_classes": 0}, {}),
    "all": ({"patch_size": 4, "embed_dim": 40, "num_heads": 5, "depth": 2}, {"num_heads": 4}),
}


def pair_of(small_vit, kind="alike", **options):
    of_teacher, of_student = PAIRS[kind]
    teacher, student = small_vit(seed=1, **of_teacher), small_vit(seed=2, **of_student)
    pair = AttnDistill(teacher, student, resample="patch_size" in of_teacher, **options)
    randomise(pair.projector, 3)
    return pair.double().train()


def class_token(weights, vit, images=IMAGES):
    """From matrices: the class token (B, D), its attention in the last layer (B, H, N), the logits."""
    patch = vit.patch_embed.patch_size[0]
    heads = vit.blocks[0].attn.num_heads
    tokens, seen = longhand.run_blocks(weights, longhand.embed(weights, images, patch), heads)
    token = longhand.layer_norm(tokens, weights["norm.weight"], weights["norm.bias"])[:, 0]
    logits = token @ weights["head.weight"].T + weights["head.bias"] if "head.weight" in weights else None
    return token, seen[-1]["map"][:, :, 0], logits


def merged(attention, temperature):
    """The product of all heads' attention, to the power 1 / T, rescaled."""
    product = 1.0
    for head in range(attention.shape[1]):
        product = product * attention[:, head] ** (1 / temperature)
    return product / product.sum(-1, keepdim=True)


def reference(pair, weights, of_projector):
    """Logits, alignment and divergence, from two dicts of weights and those of the projector."""
    with torch.no_grad():
        token_t, attention_t, _ = class_token(pair.teacher.state_dict(), pair.teacher)
        grids = pair.teacher.patch_embed.grid_size, pair.student.patch_embed.grid_size
        if grids[0] != grids[1]:
            attention_t = resample_class_attention(attention_t, *grids).clamp(min=1e-5)
        p_t = merged(attention_t, pair.temperature)
    token, attention, logits = class_token(weights, pair.student)
    x = token
    last = 2 * (len(pair.projector) // 2) - 2
    for layer in range(0, last + 1, 2):
        x = x @ of_projector[f"{layer}.weight"].T + of_projector[f"{layer}.bias"]
        x = x if layer == last else longhand.gelu(x)
    x = longhand.layer_norm(x, of_projector[f"{last + 1}.weight"], of_projector[f"{last + 1}.bias"])
    p_s = merged(attention, pair.temperature)
    alignment, divergence = 0.0, 0.0
    B, width = token_t.shape
    for b in range(B):
        alignment = alignment + sum((x[b, i] - token_t[b, i]) ** 2 for i in range(width)) / (B * width)
        of_image = sum(p_t[b, j] * (p_t[b, j] / p_s[b, j]).log() for j in range(p_t.shape[1]))
        divergence = divergence + of_image / B
    return logits, alignment, divergence


@pytest.mark.parametrize("kind", PAIRS)
def test_equals_matrices_and_loops(small_vit, kind):
    pair = pair_of(small_vit, kind, temperature=4.0, attention_weight=0.7)
    weights, of_projector = (
        {name: value.clone().requires_grad_() for name, value in module.state_dict().items()}
        for module in (pair.student, pair.projector)
    )
    logits, alignment, divergence = reference(pair, weights, of_projector)
    (cross_entropy(logits, LABELS) + alignment + 0.7 * divergence).backward()

    losses = pair.losses(IMAGES)
    assert losses.alignment.item() == pytest.approx(alignment.item(), rel=1e-10)
    assert losses.divergence.item() == pytest.approx(divergence.item(), rel=1e-8) and divergence > 1e-3
    found = pair(IMAGES)
    assert (found.logits - logits).abs().max() <= 1e-10 and found.transfer_loss.shape == ()
    assert found.transfer_loss.item() == pytest.approx((alignment + 0.7 * divergence).item(), rel=1e-10)
    (cross_entropy(found.logits, LABELS) + found.transfer_loss).backward()
    for module, expected in ((pair.student, weights), (pair.projector, of_projector)):
        for name, parameter in module.named_parameters():
            assert (parameter.grad - expected[name].grad).abs().max() <= 1e-10, name
            assert (parameter.grad != 0).any(), name


def test_a_squared_error_of_rows(small_vit):
    pair = pair_of(small_vit, compare=row_squared_error)
    models = (pair.student, pair.teacher)
    rows = [merged(class_token(vit.state_dict(), vit)[1], pair.temperature) for vit in models]
    by_loops = sum((own - o) ** 2 for p_s, p_t in zip(*rows) for own, o in zip(p_s, p_t)) / len(IMAGES)
    assert pair.losses(IMAGES).divergence.item() == pytest.approx(by_loops.item(), rel=1e-10)
    assert by_loops > 1e-5


@pytest.mark.parametrize("how, pick", [("max", max), ("min", min), ("mean", lambda x: sum(x) / len(x))])
@pytest.mark.parametrize("queries", [5, 1])
def test_pooled_heads_equal_loops(how, pick, queries):
    map = random_maps(2, 3, queries, 5)
    found = pool_heads(map, how)
    assert found.shape == (2, 1, queries, 5)
    for b in range(2):
        for i in range(queries):
            row = [pick([map[b, h, i, j].item() for h in range(3)]) for j in range(5)]
            np.testing.assert_allclose(found[b, 0, i].numpy(), np.array(row) / sum(row), rtol=1e-12)
