"""What cannot be walked faithfully is refused by name and with the reason, instead of being walked
wrongly."""

from functools import partial

import pytest
import timm
import torch
from timm.models.eva import Eva
from timm.models.vision_transformer import Block, DiffParallelScalingBlock, VisionTransformer

from atlib import AttentionTransfer, Plan, create_vit, walk
from atlib.adapters.timm import REASONS
from atlib.walking import Unwalkable, check_exact, check_walkable
from tests.helpers import SMALL_VIT, random_images

SMALL = SMALL_VIT | {"depth": 2}


def refused(model, *words, images=(1, 3, 32, 32)):
    with pytest.raises(Unwalkable) as caught:
        walk(model, random_images(*images))
    for word in words:
        assert word in str(caught.value)


def eva(**options):
    return Eva(**SMALL | {"use_rot_pos_emb": True} | options)


WIDE = SMALL | {"embed_dim": 48}
BLOCKS = {
    "ParallelThingsBlock": partial(create_vit, "vit_small_patch16_18x2_224", depth=2),
    "DiffParallelScalingBlock": partial(create_vit, WIDE, block_fn=DiffParallelScalingBlock),
    "DiffAttention": partial(create_vit, WIDE, attn_layer="diff"),
}


@pytest.mark.parametrize("kind", BLOCKS)
def test_other_blocks(kind):
    model = BLOCKS[kind]()
    refused(model, "layer 0", f"a {kind}: {REASONS[kind]}")
    with pytest.raises(Unwalkable, match="layer 0"):
        check_exact(model)


both_families = pytest.mark.parametrize("build", [partial(create_vit, SMALL), eva], ids=["ViT", "Eva"])
both_parts = pytest.mark.parametrize("part", ["block", "attention"])


@both_families
@both_parts
def test_a_forward_replaced_on_one_layer(build, part):
    vit = build()
    target = vit.blocks[1] if part == "block" else vit.blocks[1].attn
    target.forward = lambda x, **options: x
    refused(vit, "layer 1", f" {type(target).__name__}.forward ")


@both_families
@pytest.mark.parametrize("part", ["blocks.1", "blocks.1.attn", ""])
def test_a_hook_that_changes_what_a_model_computes(build, part):
    """A walk calls neither a model nor its blocks and their attention, and so not their hooks; those that
    only look change nothing."""
    vit = build()
    torch.nn.init.normal_(vit.head.weight)
    target, looked = vit.get_submodule(part), []
    hook = target.register_forward_hook(lambda module, inputs, output: looked.append(output))
    AttentionTransfer(vit, build(), Plan())
    hook.remove()
    target.register_forward_hook(lambda module, inputs, output: 1.5 * output)
    with pytest.raises(Unwalkable, match=f"differs .* has hooks on {part or 'itself'}, .* remove them"):
        AttentionTransfer(vit, build(), Plan())


def test_a_hook_on_all_blocks_together():
    vit = create_vit(SMALL)
    torch.nn.init.normal_(vit.head.weight)
    vit.blocks.register_forward_pre_hook(lambda module, inputs: (2 * inputs[0],))
    with pytest.raises(Unwalkable, match="has hooks on blocks"):
        AttentionTransfer(vit, create_vit(SMALL), Plan())


@both_families
@both_parts
def test_a_forward_replaced_for_a_class(monkeypatch, build, part):
    vit = build()
    kind = type(vit.blocks[0] if part == "block" else vit.blocks[0].attn)
    monkeypatch.setattr(kind, "forward", lambda self, x, **options: x)
    refused(vit, "layer 0", f" {kind.__name__}.forward ")


@pytest.mark.parametrize("kind", [VisionTransformer, Eva])
@pytest.mark.parametrize("method", ["forward", "forward_features"])
def test_a_subclass_with_its_own_forward(kind, method):
    own = type("Rewritten", (kind,), {method: lambda self, x, **options: x})
    refused(own(**SMALL), "Rewritten", f" {method},")


@pytest.mark.parametrize(
    "name, kind",
    [
        ("swin_tiny_patch4_window7_224", "SwinTransformer"),
        ("swinv2_tiny_window8_256", "SwinTransformerV2"),
        ("samvit_base_patch16", "VisionTransformerSAM"),
        ("cait_xxs24_224", "Cait"),
        ("resnet18", "ResNet"),
    ],
)
def test_other_models(name, kind):
    depth = {"depth": 2} if name.split("_")[0] in ("vit", "cait") else {}
    refused(timm.create_model(name, **depth), f"a {kind}: {REASONS.get(kind, '')}")


def test_anything_else():
    refused(torch.nn.Linear(3, 3), "a Linear: ")
    with pytest.raises(Unwalkable, match="NoneType"):
        check_walkable(None)


@pytest.mark.parametrize(
    "name, way_out",
    [("DistributedDataParallel", "wrap the pair"), ("FullyShardedDataParallel", "wrap the pair")],
)
def test_wrappers_say_what_to_pass(name, way_out):
    """A wrapper that is called as the real one is: making a real one needs processes or a compiler."""
    refused(type(name, (torch.nn.Module,), {})(), name, way_out)


def test_a_model_of_data_parallel():
    refused(torch.nn.DataParallel(create_vit(SMALL)), "DataParallel", ".module", "accelerate launch")


def test_a_compiled_model():
    refused(torch.compile(create_vit(SMALL)), "OptimizedModule", "_orig_mod")


def test_a_pair_says_what_to_pass():
    pair = AttentionTransfer(create_vit(SMALL), create_vit(SMALL), Plan())
    refused(pair, "AttentionTransfer", ".student", ".teacher")


def test_a_class_says_itself_why_it_is_not_walked():
    class Own(torch.nn.Module):
        not_walkable = "it is a sieve: walk its .water"

    class More(Own):
        pass

    refused(Own(), "cannot walk a Own: it is a sieve: walk its .water")
    refused(More(), "cannot walk a More: it is a sieve")
    assert not any(kind in REASONS for kind in ("AttentionTransfer", "PatchConvNet", "MaskedAutoencoder"))


def test_distilled_training_mode():
    vit = create_vit("deit_tiny_distilled_patch16_224", depth=2, img_size=32)
    vit.set_distilled_training()
    vit.train()
    refused(vit, "distilled_training", "set_distilled_training(False)")
    walk(vit.eval(), random_images(1, 3, 32, 32))  # in evaluation it is an ordinary ViT


def test_subclasses_of_the_parts():
    class Half(Block):
        def forward(self, x, **options):
            return super().forward(x, **options) / 2

    refused(create_vit(SMALL, block_fn=Half), "layer 0", "a Half: ", "timm's Block ")


def test_a_refused_model_has_not_been_run():
    """The refusal comes before anything is computed, so that no dropout is drawn and no wrong shape gets in
    the way."""
    refused(timm.create_model("resnet18"), "ResNet", images=(1, 1, 2, 2))


def test_a_pair_refuses_what_walk_refuses():
    good, bad = create_vit(WIDE), create_vit(WIDE, block_fn=DiffParallelScalingBlock)
    for teacher, student in ((bad, good), (good, bad)):
        with pytest.raises(Unwalkable, match="DiffParallelScalingBlock"):
            AttentionTransfer(teacher, student, Plan())


def test_a_pair_checks_each_model_once(monkeypatch):
    teacher, student = create_vit(SMALL), create_vit(SMALL)
    pair = AttentionTransfer(teacher, student, Plan(how="distill"))
    looked_at = []
    monkeypatch.setattr("atlib.adapters.timm._check_part", lambda part, *where: looked_at.append(part))
    pair(random_images(1, 3, 32, 32))
    assert looked_at == []
    walk(student, random_images(1, 3, 32, 32))
    assert looked_at == [part for block in student.blocks for part in (block, block.attn)]


def test_the_mode_of_a_student_is_looked_at_in_every_walk():
    distilled = {"depth": 2, "img_size": 32}
    student = create_vit("deit_tiny_distilled_patch16_224", **distilled)
    pair = AttentionTransfer(create_vit("deit_tiny_distilled_patch16_224", **distilled), student, Plan())
    student.set_distilled_training()
    with pytest.raises(Unwalkable, match="distilled_training"):
        pair.train()(random_images(1, 3, 32, 32))


def test_another_attention_class_in_eva():
    vit = eva()
    vit.blocks[1].attn.__class__ = type("Half", (type(vit.blocks[1].attn),), {})
    refused(vit, "layer 1", "a Half: ", "timm's EvaAttention ")
