"""Models of transformers, torchvision and open_clip are walked exactly, and teach."""

import copy

import pytest
import torch
from torch import nn

from atlib import AttentionTransfer, Plan, create_student, create_vit, walk
from atlib.adapters import adapter_of
from atlib.pair import Normalisation, attach
from atlib.student import describe
from atlib.attention import Instead, Unwalkable, check_exact
from tests import longhand
from tests.helpers import random_images, randomise
from tools.other_libraries import models

pytest.importorskip("transformers")
pytest.importorskip("open_clip")

EAGER, FUSED = models("eager"), models("sdpa")
IMAGES = random_images(2, 3, 32, 32)
every_model = pytest.mark.parametrize("name", FUSED)


def built(name, of=FUSED):
    return randomise(of[name]()).eval()


@every_model
def test_logits_or_last_hidden_state_equal_the_models(name):
    for of in (EAGER, FUSED):
        model = built(name, of)
        adapter = adapter_of(model)
        with torch.no_grad():
            own, found = adapter.output(IMAGES), walk(model, IMAGES).logits
        assert found.shape == own.shape
        assert (found - own).abs().max() <= 1e-5 * own.abs().max()
        assert own.std() > 1e-3, "an output that is the same everywhere would hide a wrong walk"


@pytest.mark.parametrize("name", [name for name in EAGER if name.startswith("transformers")])
def test_maps_equal_output_attentions(name):
    model = built(name, EAGER)
    order = {"noise": torch.arange(16.0).expand(2, -1)} if "MAE" in name else {}
    with torch.no_grad():
        expected = model(IMAGES, output_attentions=True, **order).attentions
        found = walk(model, IMAGES).layers
    assert len(found) == len(expected) == 3
    for seen, p in zip(found, expected):
        assert (seen.map - p).abs().max() <= 1e-5
        assert p.amax() > 0.15, "a flat map (1 / 17) would hide a wrong scale or bias"


@every_model
def test_a_pair_computes_the_dense_definition(name):
    """Copy: the student's logits with the teacher's whole maps put in; Distill: the cross-entropy of maps
    that are written out. The student is timm's ViT of the same components."""
    teacher = built(name, EAGER)
    student = randomise(create_student(teacher, 7), seed=1)
    with torch.no_grad():
        maps = [seen.map for seen in walk(teacher, IMAGES).layers]
    copied = AttentionTransfer(teacher, student, Plan(how="copy"))(IMAGES).logits
    expected = walk(student, IMAGES, replace={i: Instead(map=p) for i, p in enumerate(maps)}).logits
    assert (copied - expected).abs().max() <= 1e-4 * expected.abs().max()

    student.zero_grad()
    loss = AttentionTransfer(teacher, student, Plan(how="distill"))(IMAGES).transfer_loss
    loss.backward()
    gradients = {key: weight.grad for key, weight in student.named_parameters()}
    student.zero_grad()
    dense = longhand.map_loss([seen.map for seen in walk(student, IMAGES).layers], maps)
    assert loss.item() == pytest.approx(dense.item(), rel=1e-5)
    dense.backward()
    for key, weight in student.named_parameters():
        if weight.grad is None:
            assert gradients[key] is None or gradients[key].abs().max() == 0
            continue
        assert (gradients[key] - weight.grad).abs().max() <= 1e-4 * weight.grad.abs().max() + 1e-7, key
    assert all(weight.grad is None and not weight.requires_grad for weight in teacher.parameters())


@pytest.mark.parametrize("name", ["transformers ViTModel", "transformers Dinov2ForImageClassification"])
def test_a_model_of_another_library_as_the_student(name):
    teacher, student = built(name), FUSED[name]()
    pair = AttentionTransfer(teacher, student, Plan(how="distill")).train()
    pair(IMAGES).transfer_loss.backward()
    assert walk(student, IMAGES).layers[0].q.requires_grad
    gradients = {key for key, weight in student.named_parameters() if weight.grad is not None}
    assert any("layers.0" in key or "layer.0" in key for key in gradients)
    assert all(weight.grad is None for weight in teacher.parameters())


@pytest.mark.parametrize("name", ["transformers CLIPVisionModel", "torchvision VisionTransformer"])
def test_a_live_model_is_told_how_its_images_are_normalised(name):
    """It does not say it itself: without that it sees the student's images as they are."""
    teacher = built(name)
    student = create_student(teacher, 7)
    silent = AttentionTransfer(teacher, student, Plan(), normalisation=Normalisation(0.5, 0.25))
    assert silent.for_teacher(IMAGES) is IMAGES and "does not say" in silent.teacher_view()
    attach(teacher, Normalisation(0.1, 0.2))
    told = AttentionTransfer(teacher, student, Plan(), normalisation=Normalisation(0.5, 0.25))
    expected = ((IMAGES * 0.25 + 0.5) - 0.1) / 0.2
    torch.testing.assert_close(told.for_teacher(IMAGES), expected)


def test_distill_lets_go_of_the_blocks_that_it_does_not_run():
    teacher = built("transformers Dinov2ForImageClassification")
    pair = AttentionTransfer(teacher, create_student(teacher, 7), Plan(how="distill", layers=[0, 1]))
    assert len(pair.teacher.dinov2.encoder.layer) == 2 and len(teacher.dinov2.encoder.layer) == 3
    assert pair(IMAGES).transfer_loss > 0
    assert copy.deepcopy(pair)(IMAGES).transfer_loss == pair(IMAGES).transfer_loss


def test_stop_after_runs_nothing_later():
    model = built("transformers ViTModel")
    whole = walk(model, IMAGES).layers[1].map
    model.layers[2].register_forward_pre_hook(lambda *_: pytest.fail("layer 2 was run"))
    model.layers[1].mlp.register_forward_pre_hook(lambda *_: pytest.fail("the MLP of layer 1 was run"))
    found = walk(model, IMAGES, stop_after=1)
    assert found.logits is None and found.layers[1].v is None
    torch.testing.assert_close(found.layers[1].map, whole)


def test_components_are_those_of_the_family():
    said = describe(built("transformers Dinov2WithRegistersModel"))
    assert said["registers"] == 2 and said["layer_scale"] == "attention and MLP"
    said = describe(built("transformers CLIPVisionModel"))
    assert said["pre_norm"] is True and said["activation"] == "QuickGELU"
    assert describe(built("transformers DINOv3ViTModel"))["positions"] == "rotary (DinoV3)"
    assert describe(built("transformers BeitModel"))["positions"] == "relative (a bias in each layer)"


def test_another_class_is_refused_with_the_way_out():
    import transformers

    sizes = {"embedding_size": 8, "hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1]}
    other = transformers.ResNetModel(transformers.ResNetConfig(**sizes))
    with pytest.raises(Unwalkable, match="ResNetModel.*examples/own_vit.py"):
        walk(other, IMAGES)
    with pytest.raises(Unwalkable, match=r"mask_ratio = 0"):
        masking = built("transformers ViTMAEModel")
        masking.config.mask_ratio = 0.75
        walk(masking, IMAGES)


def test_a_walk_that_is_not_exact_is_refused_when_a_pair_is_built():
    """A class of the library whose forward is another one than the adapter's."""
    model = built("transformers ViTModel")

    class Louder(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    class Half(type(model.layers[1].attention)):
        def forward(self, *arguments, **options):
            out, maps = super().forward(*arguments, **options)
            return out / 2, maps

    model.layers[1].attention.__class__ = Half
    with pytest.raises(Unwalkable, match="differs from the model's own output"):
        check_exact(model)
    with pytest.raises(Unwalkable, match="differs"):
        AttentionTransfer(model, create_student(model, 7), Plan())
    model = built("transformers ViTModel")
    model.layers[0].mlp.fc1.__class__ = Louder  # a part that the walk calls is walked as it is
    assert check_exact(model) <= 1e-5


def test_images_are_resized_for_a_teacher_that_says_its_size_elsewhere():
    """torchvision's has no `patch_embed`; it once got the student's images, and failed inside."""
    from torchvision.models import VisionTransformer

    teacher = VisionTransformer(
        image_size=32, patch_size=8, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=32, num_classes=3
    )
    student = create_vit("glyphs", img_size=64, patch_size=16, depth=2, num_heads=2, embed_dim=16)
    pair = AttentionTransfer(teacher, student, Plan(mismatched=True))
    images = random_images(2, 3, 64, 64)
    assert pair.for_teacher(images).shape == (2, 3, 32, 32)
    assert pair(images).logits.shape == (2, 8)


def test_maps_may_be_served_to_a_student_of_another_library():
    teacher, student = (built("torchvision VisionTransformer") for _ in range(2))
    with torch.no_grad():
        maps = {layer: seen.map for layer, seen in enumerate(walk(teacher, IMAGES).layers)}
    served = AttentionTransfer(teacher, student, Plan(), maps=lambda images: maps)
    difference = served(IMAGES).logits - AttentionTransfer(teacher, student, Plan())(IMAGES).logits
    assert difference.abs().max() <= 1e-5


def test_libraries_are_not_imported_for_models_of_timm(tmp_path):
    import subprocess
    import sys

    code = (
        "import sys; from atlib import walk, create_vit; import torch;"
        "walk(create_vit('glyphs'), torch.zeros(1, 3, 32, 32));"
        "print([name for name in ('transformers', 'open_clip') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_create_vit_is_a_student_of_another_library():
    teacher = built("transformers ViTModel")
    student = create_vit(dict(img_size=32, patch_size=8, embed_dim=24, depth=3, num_heads=3, num_classes=7))
    with pytest.raises(ValueError, match="norm: teacher LayerNorm 1e-12"):
        AttentionTransfer(teacher, student, Plan())
    assert AttentionTransfer(teacher, student, Plan(mismatched=True)).mismatched.keys() == {"norm"}
