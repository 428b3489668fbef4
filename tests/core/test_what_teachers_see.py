"""A teacher sees images normalised and sized as it was trained to see them, and the same bits where nothing
differs."""

import copy
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
from atlib.checkpoint import load_bundle, read_header, save_bundle, write_tensors
from atlib.mae import MaskedAutoencoder
from atlib.pair import IMAGENET, Normalisation, Pair, attach
from atlib.vit import Architecture
from tests.helpers import random_images, randomise

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


def distilled_mae(teacher, student, **options):
    return DistilledMae(teacher, MaskedAutoencoder(student, 0.5, 16, 1, 2), **options)


def hidden_states(teacher, student, **options):
    return DistilledHiddenMae(teacher, MaskedAutoencoder(student, 0.5, 16, 1, 2), **options)


def with_token(teacher, student, **options):
    return DistillationToken(teacher, create_vit(TINY, distilled=True), **options)


PAIRS = {
    "copy": lambda *vits, **options: AttentionTransfer(*vits, Plan(), **options),
    "distill": lambda *vits, **options: AttentionTransfer(*vits, Plan(how="distill"), **options),
    "features": FeatureDistillation,
    "tokens": TokenDistillation,
    "logits": LogitDistillation,
    "token": with_token,
    "attndistill": AttnDistill,
    "dmae": distilled_mae,
    "hidden states": hidden_states,
    "seed": partial(SimilarityDistillation, queue=4),
    "compress": partial(CompRess, queue=4),
}


def test_white_reaches_augreg_as_one_not_as_2_64():
    teacher = timm.create_model("vit_tiny_patch16_224.augreg_in21k", img_size=32, num_classes=0)
    student = create_student(teacher, 5)
    with pytest.warns(UserWarning, match="mean 0.5 0.5 0.5"):
        pair = AttentionTransfer(teacher, student, Plan())
    images = white(IMAGENET)
    assert images[0].max() > 2.6
    seen = first_seen(pair, images)
    assert torch.allclose(seen[0], torch.ones(3, 32, 32), atol=1e-6)
    assert torch.allclose(seen[1], -torch.ones(3, 32, 32), atol=1e-6)


@pytest.mark.parametrize("kind", PAIRS)
def test_every_pair_normalises_anew(kind):
    teacher, student = vits(num_classes=4)
    pair = PAIRS[kind](teacher, student, normalisation=IMAGENET)
    assert torch.allclose(first_seen(pair, white(IMAGENET))[0], torch.ones(3, 32, 32), atol=1e-6)


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize("own", [None, HALF], ids=["unknown", "equal"])
def test_where_nothing_differs_the_teacher_gets_the_same_tensor(kind, own):
    teacher, student = vits(own)
    pair = PAIRS[kind](teacher, student, normalisation=HALF)
    images = white(HALF)
    assert pair.for_teacher(images) is images and first_seen(pair, images) is images


def test_the_default_is_imagenet_and_is_said_where_it_matters():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        AttentionTransfer(*vits(None), Plan())
        pair = AttentionTransfer(*vits(IMAGENET), Plan())
    assert pair.normalisation == IMAGENET and "mean 0.485 0.456 0.406" in pair.teacher_view()
    with pytest.warns(UserWarning, match="normalisation="):
        pair = AttentionTransfer(*vits(HALF), Plan())
    assert torch.allclose(pair.for_teacher(white(IMAGENET))[0], torch.ones(3, 32, 32), atol=1e-6)


def test_mean_maps_are_those_of_what_the_teacher_was_trained_to_see():
    teacher, student = vits()
    anew = MeanMapCopy(teacher, student, white(IMAGENET), normalisation=IMAGENET)
    own = MeanMapCopy(teacher, student, white(HALF), normalisation=HALF)
    assert torch.allclose(anew.maps_0, own.maps_0, atol=1e-6)
    assert not torch.allclose(anew.maps_0, MeanMapCopy(*vits(None), white(IMAGENET)).maps_0, atol=1e-6)


@pytest.mark.parametrize("kind", ["copy", "distill", "features", "attndistill", "dmae"])
def test_images_are_resized_for_a_teacher_of_the_same_grid(kind):
    teacher, student = vits(img_size=64, patch_size=16)
    pair = PAIRS[kind](teacher, student, normalisation=IMAGENET)
    seen = first_seen(pair, white(IMAGENET))
    assert seen.shape == (2, 3, 64, 64) and torch.allclose(seen[0], torch.ones(3, 64, 64), atol=1e-5)


def test_copy_sees_the_same_after_it_was_saved(tmp_path):
    teacher, student = vits()
    pair = AttentionTransfer(teacher, student, Plan(), normalisation=IMAGENET).eval()
    images = white(IMAGENET)
    path = save_bundle(tmp_path / "pair.safetensors", pair, Architecture(TINY), Architecture(TINY))
    again = load_bundle(path)
    assert (again.normalisation, again.teacher_normalisation) == (IMAGENET, HALF)
    assert torch.equal(again(images).logits, pair(images).logits)
    # a file of before says nothing: its teacher saw what the student sees
    header = {name: part for name, part in read_header(path).items() if "normalisation" not in name}
    from atlib.checkpoint import read_tensors

    old = load_bundle(write_tensors(tmp_path / "old.safetensors", read_tensors(path)[0], header))
    assert old.for_teacher(images) is images


@pytest.mark.parametrize("channels", [1, 4, 5])
def test_a_teacher_of_other_channels_sees_the_students_images(channels):
    """timm#976: timm gives models of one channel, and of five, the configuration of those of three."""
    teacher = timm.create_model(
        "vit_tiny_patch16_224", in_chans=channels, depth=1, img_size=32, num_classes=0
    )
    images = random_images(2, channels, 32, 32)
    assert Normalisation.of(teacher) is None
    for said in (None, Normalisation([0.5] * channels, [0.5] * channels)):
        pair = AttentionTransfer(teacher, create_student(teacher, 5), Plan(how="distill"), normalisation=said)
        assert pair(images)[1].isfinite() and pair.for_teacher(images) is images
        assert "does not say" in pair.teacher_view()
    attach(teacher, Normalisation([0.2] * channels, [0.1] * channels))
    pair = AttentionTransfer(teacher, create_student(teacher, 5), Plan(how="distill"), normalisation=said)
    torch.testing.assert_close(pair.for_teacher(images), (images * 0.5 + 0.5 - 0.2) / 0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("how, what", [("copy", "map"), ("distill", "map"), ("distill", "q"), ("copy", "v")])
def test_a_teacher_in_another_precision_teaches_a_student_in_float32(dtype, how, what):
    """transformers#28633: weights in bfloat16, images in float32."""
    sizes = dict(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2)
    teacher = randomise(create_vit({**sizes, "num_classes": 0})).eval()
    student, images = randomise(create_vit({**sizes, "num_classes": 5}), 1), random_images(2, 3, 32, 32)
    plan = Plan(how=how, what=what)
    right = AttentionTransfer(teacher, student, plan).eval()(images)
    pair = AttentionTransfer(copy.deepcopy(teacher).to(dtype), student, plan).eval()
    logits, loss = pair(images)
    assert logits.dtype == loss.dtype == torch.float32
    torch.testing.assert_close(logits, right[0], rtol=0.1, atol=0.1 * right[0].abs().max().item())
    torch.testing.assert_close(loss, right[1], rtol=0.05, atol=1e-6)
    assert next(pair.teacher.parameters()).dtype == dtype
