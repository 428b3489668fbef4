"""A teacher sees images as it was trained to see them, and the same bits where nothing differs."""

import warnings
from functools import partial

import pytest
import timm
import torch

from atfamily.attndistill import AttnDistill
from atfamily.distillation_token import DistillationToken
from atfamily.distilled_mae import DistilledHiddenMae, DistilledMae
from atfamily.similarity import CompRess, SimilarityDistillation
from atfamily.token_distillation import TokenDistillation
from atlib import AttentionTransfer, Plan, create_student, create_vit
from atlib.baselines import FeatureDistillation, LogitDistillation, MeanMapCopy
from atlib.checkpoint import load_bundle, read_header, read_tensors, save_bundle, write_tensors
from atlib.mae import MaskedAutoencoder
from atlib.pair import IMAGENET, Normalisation, Pair, attach
from atlib.vit import Architecture
from tests.helpers import random_images

HALF = Normalisation(0.5, 0.5)
TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2, "num_classes": 4}


def white(normalisation: Normalisation, size: int = 32) -> torch.Tensor:
    """A white image and a black one, as a data set hands them out."""
    pixels = torch.stack([torch.ones(3, size, size), torch.zeros(3, size, size)])
    mean, std = (torch.tensor(part)[:, None, None] for part in (normalisation.mean, normalisation.std))
    return (pixels - mean) / std


def vits(own: Normalisation | None = HALF, **options):
    """A teacher that says how its images are normalised, and a student of the same kind."""
    torch.manual_seed(0)
    teacher, student = create_vit(TINY | options), create_vit(TINY)
    attach(teacher, own)
    return teacher, student


def first_seen(pair: Pair, images: torch.Tensor) -> torch.Tensor:
    """What the teacher's first layer is given."""
    seen = []
    hook = pair.teacher.patch_embed.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    try:
        pair.train()(images)
    finally:
        hook.remove()
    return seen[0]


def painting(kind):
    def build(teacher, student, **options):
        return kind(teacher, MaskedAutoencoder(student, 0.5, 16, 1, 2), **options)

    return build


PAIRS = {
    "copy": partial(AttentionTransfer, plan=Plan()),
    "distill": partial(AttentionTransfer, plan=Plan(how="distill")),
    "features": FeatureDistillation,
    "tokens": TokenDistillation,
    "logits": LogitDistillation,
    "token": lambda teacher, _, **more: DistillationToken(teacher, create_vit(TINY, distilled=True), **more),
    "attndistill": AttnDistill,
    "dmae": painting(DistilledMae),
    "hidden states": painting(DistilledHiddenMae),
    "seed": partial(SimilarityDistillation, queue=4),
    "compress": partial(CompRess, queue=4),
}


@pytest.mark.parametrize("kind", PAIRS)
def test_every_pair_normalises_anew_where_something_differs(kind):
    """White reaches the teacher as 1, not as 2.64; where nothing differs, the same tensor does."""
    seen = first_seen(PAIRS[kind](*vits(), normalisation=IMAGENET), white(IMAGENET))
    assert torch.allclose(seen[0], torch.ones(3, 32, 32), atol=1e-6)
    assert torch.allclose(seen[1], -torch.ones(3, 32, 32), atol=1e-6)
    for own in (None, HALF):
        pair, images = PAIRS[kind](*vits(own), normalisation=HALF), white(HALF)
        assert pair.for_teacher(images) is images and first_seen(pair, images) is images


@pytest.mark.parametrize("kind", ["copy", "distill", "features", "attndistill", "dmae"])
def test_images_are_resized_for_a_teacher_of_the_same_grid(kind):
    pair = PAIRS[kind](*vits(img_size=64, patch_size=16), normalisation=IMAGENET)
    seen = first_seen(pair, white(IMAGENET))
    assert seen.shape == (2, 3, 64, 64) and torch.allclose(seen[0], torch.ones(3, 64, 64), atol=1e-5)


def test_the_default_is_imagenet_and_is_said_where_it_matters():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        AttentionTransfer(*vits(None), Plan())
        assert AttentionTransfer(*vits(IMAGENET), Plan()).normalisation == IMAGENET
    with pytest.warns(UserWarning):
        pair = AttentionTransfer(*vits(HALF), Plan())
    assert torch.allclose(pair.for_teacher(white(IMAGENET))[0], torch.ones(3, 32, 32), atol=1e-6)


def test_mean_maps_are_those_of_what_the_teacher_was_trained_to_see():
    anew = MeanMapCopy(*vits(), white(IMAGENET), normalisation=IMAGENET)
    own = MeanMapCopy(*vits(), white(HALF), normalisation=HALF)
    assert torch.allclose(anew.maps_0, own.maps_0, atol=1e-6)
    assert not torch.allclose(anew.maps_0, MeanMapCopy(*vits(None), white(IMAGENET)).maps_0, atol=1e-6)


def test_copy_sees_the_same_after_it_was_saved(tmp_path):
    pair = AttentionTransfer(*vits(), Plan(), normalisation=IMAGENET).eval()
    images, path = white(IMAGENET), tmp_path / "pair.safetensors"
    again = load_bundle(save_bundle(path, pair, Architecture(TINY), Architecture(TINY)))
    assert (again.normalisation, again.views[0].normalisation) == (IMAGENET, HALF)
    assert torch.equal(again(images).logits, pair(images).logits)
    # a file of before says nothing: its teacher saw what the student sees
    header = {name: part for name, part in read_header(path).items() if "normalisation" not in name}
    old = load_bundle(write_tensors(tmp_path / "old.safetensors", read_tensors(path)[0], header))
    assert old.for_teacher(images) is images


def test_a_teacher_of_other_channels_sees_the_students_images():
    """timm#976: timm gives models of one channel, and of five, the configuration of those of three."""
    teacher = timm.create_model("vit_tiny_patch16_224", in_chans=5, depth=1, img_size=32, num_classes=0)
    student, images = create_student(teacher, 5), random_images(2, 5, 32, 32)
    told = Normalisation([0.5] * 5, [0.5] * 5)
    for normalisation in (None, told):
        pair = AttentionTransfer(teacher, student, Plan(how="distill"), normalisation=normalisation)
        assert pair(images)[1].isfinite() and pair.for_teacher(images) is images
    attach(teacher, Normalisation([0.2] * 5, [0.1] * 5))
    pair = AttentionTransfer(teacher, student, Plan(how="distill"), normalisation=told)
    torch.testing.assert_close(pair.for_teacher(images), (images * 0.5 + 0.5 - 0.2) / 0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("how, what", [("copy", "map"), ("distill", "map"), ("distill", "q"), ("copy", "v")])
def test_a_teacher_in_another_precision_teaches_a_student_in_float32(small_vit, dtype, how, what):
    """transformers#28633: weights in bfloat16, images in float32."""
    teacher, student, images = small_vit(), small_vit(1), random_images(2, 3, 32, 32)
    plan = Plan(how=how, what=what)
    right = AttentionTransfer(teacher, student, plan)(images)
    logits, loss = AttentionTransfer(small_vit().to(dtype), student, plan)(images)
    assert logits.dtype == loss.dtype == torch.float32
    torch.testing.assert_close(logits, right[0], rtol=0.1, atol=0.1 * right[0].abs().max().item())
    torch.testing.assert_close(loss, right[1], rtol=0.05, atol=1e-6)
