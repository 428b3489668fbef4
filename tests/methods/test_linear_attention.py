"""Linear attention is its written-out map times v, features are the published ones, losses their formulas."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from atfamily.linear_attention import EluPlusOne, Hedgehog, LinearAttention, LinearTransfer, linear_attention
from atlib import walk
from atlib.attention import FORBIDDEN, Instead, Seen, Unwalkable
from atlib.losses import attention_cross_entropy
from tests import longhand
from tests.helpers import random_images, random_maps, randomise, same, state_of

KINDS = pytest.mark.parametrize("features", [Hedgehog, EluPlusOne])
WHAT = pytest.mark.parametrize("what", ["map", "output"])


@pytest.fixture
def images():
    return random_images(2, 3, 32, 32, dtype=torch.float64)


@pytest.fixture
def student(small_vit):
    def built(features=Hedgehog, seed=1, **options):
        return randomise(LinearAttention(small_vit(seed, **options).double(), features).double(), seed)

    return built


def longhand_features(student, layer, which, x):
    """Row by row: (B, H, N, d) to (B, H, N, features)."""
    phi = student.features[which][layer]
    if isinstance(phi, EluPlusOne):
        return torch.where(x > 0, x + 1, x.exp())
    B, H, N, d = x.shape
    out = x.new_zeros(B, H, N, 2 * d)
    for b in range(B):
        for h in range(H):
            for n in range(N):
                y = (x[b, h, n, :, None] * phi.weight[h]).sum(0)
                up, down = y.exp(), (-y).exp()
                out[b, h, n] = torch.cat([up / up.sum(), down / down.sum()])
    return out


def map_of(student, layer, q, k):
    q, k = (longhand_features(student, layer, which, x) for which, x in enumerate((q, k)))
    p = q @ k.mT
    return p / p.sum(-1, keepdim=True)


def test_hedgehogs_features_are_those_of_the_published_definition():
    """[softmax(x W), softmax(-x W)] over the head's width, W at first the identity, no bias, at least 1e-12:
    LoLCATs' published code (feature_map.py, "softmax_dim" behind an untied matrix of each head)."""
    phi, x = Hedgehog(2, 4).double(), 30 * random_images(3, 2, 5, 4, dtype=torch.float64)
    published = torch.cat([F.softmax(x, -1), F.softmax(-x, -1)], -1).clamp(min=1e-12)
    assert torch.equal(phi(x), published) and published.min() == 1e-12


def test_a_mask_takes_its_share_of_a_linear_map():
    """As a student's mask does of a teacher's map in the cross-entropy."""
    q, k, v = torch.rand(3, 2, 3, 5, 4, dtype=torch.float64)
    seen = Seen(q, k, v, 0.5, attend=lambda q, k, v: q @ (k.mT @ v) / (q @ k.mT).sum(-1, keepdim=True))
    allowed = torch.ones(5, 5, dtype=torch.float64).tril()
    found = seen.without(FORBIDDEN * (1 - allowed)).map
    expected = q @ k.mT * allowed
    torch.testing.assert_close(found, expected / expected.sum(-1, keepdim=True))


@KINDS
def test_the_model_computes_what_its_maps_written_out_compute(student, images, features):
    """Layer by layer, by a ViT written out by hand; nothing of the model is changed."""
    model = student(features)
    before = state_of(model)
    seen = model.walk(images)
    maps = {i: map_of(model, i, layer.q, layer.k) for i, layer in enumerate(seen.layers)}
    for i, layer in enumerate(seen.layers):
        assert (layer.map - maps[i]).abs().max() < 1e-11
    replace = {i: longhand.of_heads("map", p) for i, p in maps.items()}
    expected = longhand.layers(model.model.state_dict(), images, 3, replace=replace)[0]
    assert (seen.logits - expected).abs().max() < 1e-10
    assert torch.equal(model(images), seen.logits) and same(before, state_of(model))
    assert not torch.allclose(seen.logits, model.model(images), atol=1e-3), "softmax gives something else"


@KINDS
def test_gradients_reach_every_weight_and_are_finite_also_for_large_inputs(student, images, features):
    model = student(features).train()
    for scale in (1, 1e3):
        model.zero_grad()
        model.float()(scale * images.float()).square().sum().backward()
        for name, weight in model.named_parameters():
            assert weight.grad is not None and weight.grad.isfinite().all(), name


@WHAT
@KINDS
def test_the_losses_are_their_formulas(small_vit, student, images, features, what):
    teacher, model = small_vit(2).double(), student(features)
    found = LinearTransfer(teacher, model, what).train()(images)
    expected = 0
    pairs = zip(model.walk(images).layers, walk(teacher, images).layers)
    for i, (of_student, of_teacher) in enumerate(pairs):
        p_s = map_of(model, i, of_student.q, of_student.k)
        p_t = (of_teacher.q @ of_teacher.k.mT * 8**-0.5).softmax(-1)
        if what == "map":
            expected += -(p_t * p_s.log()).sum(-1).mean()
        else:
            expected += (p_s @ of_student.v - p_t @ of_teacher.v).square().mean()
    assert found.transfer_loss.item() == pytest.approx(expected.item(), rel=1e-10)
    assert torch.equal(found.logits, model(images))
    found.transfer_loss.backward()
    assert all(weight.grad is None for weight in teacher.parameters())
    grads = [weight.grad for weight in model.features.parameters()]
    assert all(grad.isfinite().all() and grad.any() for grad in grads)


@WHAT
def test_a_model_that_teaches_itself_moves_its_features_alone_and_on_its_own_inputs(student, images, what):
    model = student()
    softmax = walk(model.model, images)
    loss = LinearTransfer(model.model, model, what).train()(images).transfer_loss
    expected = 0
    for i, seen in enumerate(softmax.layers):
        p = map_of(model, i, seen.q, seen.k)
        of_map, of_output = -(seen.map * p.log()).sum(-1).mean(), ((p - seen.map) @ seen.v).square().mean()
        expected += of_map if what == "map" else of_output
    assert loss.item() == pytest.approx(expected.item(), rel=1e-10)
    loss.backward()
    assert all(weight.grad is None for weight in model.model.parameters())
    assert all(weight.grad.any() for weight in model.features.parameters())


def test_the_teacher_may_see_another_image_and_is_not_run_in_evaluation(small_vit, student, images):
    teacher, model = small_vit(2).double(), student()
    pair, others = LinearTransfer(teacher, model).train(), images.flip(0)
    apart = pair(torch.stack([images, others], 1))
    assert torch.equal(apart.logits, model(images))
    assert not torch.equal(apart.transfer_loss, pair(images).transfer_loss)
    pair.eval()
    teacher.forward = None
    with torch.no_grad():
        logits, loss = pair(torch.stack([images, others], 1))
    assert torch.equal(logits, model(images)) and loss.isnan()


def test_what_cannot_be_is_refused(small_vit, student, images):
    class Causal(nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    model, x = student(), random_images(1, 1, 4, 4)
    with pytest.raises(Unwalkable):
        walk(model, images)
    seen, plain = model.walk(images).layers, walk(small_vit(0).double(), images).layers
    both = {0: Instead(attend=linear_attention, map=random_maps(2, 3, 17, 17))}
    for wrong in (
        lambda: LinearTransfer(small_vit(0, depth=2), model),
        lambda: LinearTransfer(small_vit(0), model, "maps"),
        lambda: walk(model.model, images, replace=both),
        lambda: attention_cross_entropy(seen, plain),  # its gradients would be those of softmax
        lambda: walk(Causal(), x, replace={0: Instead(attend=linear_attention)}),  # it would look ahead
    ):
        with pytest.raises(ValueError):
            wrong()
