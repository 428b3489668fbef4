"""A bias by relative position, per head: BEiT's, timm's relative-position ViTs', in both rooms of a pair."""

import pytest
import timm
import torch

from atlib import AttentionTransfer, Normalisation, Plan, walk
from atlib.attention import Instead, Seen
from atlib.attention_transfer import _select
from atlib.student import describe
from tests.helpers import random_images, randomise

SIZE = {"img_size": 64, "depth": 2, "num_classes": 5}
NAMES = ["test_vit_relpos", "vit_relpos_small_patch16_224"]
IMAGES = random_images(2, 3, 64, 64)


def beit(**options):
    kinds = {"embed_dim": 24, "num_heads": 3, "patch_size": 16, "use_rel_pos_bias": True, "init_values": 0.1}
    return timm.models.beit.Beit(**SIZE | kinds | options)


BUILDS = {
    "BEiT": beit,
    "BEiT, both": lambda: beit(use_shared_rel_pos_bias=True),
    **{name: lambda name=name: timm.create_model(name, **SIZE) for name in NAMES if timm.is_model(name)},
}


@pytest.mark.parametrize("name", BUILDS)
def test_a_pair_computes_the_dense_definition(name):
    """With a bias in the teacher and in the student: the student's own learns too, and is not in a copy."""
    # in eval mode: a relative-position MLP drops out
    teacher, student = (randomise(BUILDS[name](), seed=seed).double().eval() for seed in (0, 1))
    images = IMAGES.double()
    assert describe(teacher) == describe(student)
    with torch.no_grad():
        maps = [seen.map for seen in walk(teacher, images).layers]
    expected = walk(student, images, replace={i: Instead(map=p) for i, p in enumerate(maps)}).logits
    told = {"normalisation": Normalisation.of(teacher)}  # what it sees: the images as they are
    copied = AttentionTransfer(teacher, student, Plan(), **told).eval()(images).logits
    assert (copied - expected).abs().max() <= 1e-9 * expected.abs().max()
    student.zero_grad()
    loss = AttentionTransfer(teacher, student, Plan(how="distill"), **told).eval()(images).transfer_loss
    loss.backward()
    found = {key: p.grad.clone() for key, p in student.named_parameters() if p.grad is not None}
    student.zero_grad()
    own = [seen.scores.log_softmax(-1) for seen in walk(student, images).layers]
    dense = sum(-(p * log_p).sum(-1).mean() for p, log_p in zip(maps, own))
    dense.backward()
    assert loss.item() == pytest.approx(dense.item(), rel=1e-10)
    for key, weight in student.named_parameters():
        if weight.grad is not None:
            assert (found[key] - weight.grad).abs().max() <= 1e-9 * weight.grad.abs().max() + 1e-14, key
    learned = [key for key in found if "rel_pos" in key or "relative_position_bias_table" in key]
    assert learned and all(found[key].abs().max() > 0 for key in learned)


def test_some_heads_are_copied_with_their_bias_and_merged_heads_have_the_sum():
    teacher, student, other = (randomise(beit(num_heads=n), seed).eval() for seed, n in enumerate((3, 3, 2)))
    own, of_teacher = (walk(model, IMAGES).layers[0] for model in (student, teacher))
    found = AttentionTransfer(teacher, student, Plan(heads=[1])).walk(IMAGES).layers[0].map
    assert (found[:, 1] - of_teacher.map[:, 1]).abs().max() <= 1e-5
    assert (found[:, [0, 2]] - own.map[:, [0, 2]]).abs().max() <= 1e-5
    merged = AttentionTransfer(teacher, other, Plan(unequal_heads="aggregate")).walk(IMAGES).layers[0].map
    expected = (of_teacher.scores.log_softmax(-1).sum(1, keepdim=True) / 10).softmax(-1)
    assert (merged - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("shape", [(5, 5), (1, 5, 5), (3, 5, 5), (2, 1, 5, 5), (2, 3, 5, 5)])
def test_a_bias_of_all_of_heads_and_of_images(shape):
    q, k, bias = random_images(2, 3, 5, 4), random_images(2, 3, 5, 4, seed=1), random_images(*shape, seed=2)
    seen = Seen(q, k, None, 0.5, bias=bias)
    assert torch.allclose(_select(seen, [2, 1]).map, seen.map[:, [2, 1]], atol=1e-6)
    merging = AttentionTransfer(beit(num_heads=3), beit(num_heads=2), Plan(unequal_heads="aggregate"))
    expected = (seen.map.log().sum(1, keepdim=True) / 10).softmax(-1)
    assert torch.allclose(merging._merged(seen).map, expected, atol=1e-6)
