"""SPT and LSA: against the published code and loops, in a walk, and beside teachers."""

import pytest
import torch
from safetensors.torch import load_file
from timm.models.vision_transformer import VisionTransformer

from atfamily.locality import localise_attention, shift_patches
from atlib import AttentionTransfer, Plan, walk
from atlib.losses import attention_cross_entropy
from tests.helpers import DROPS, ROOT, assert_same_logits, random_images, randomise, set_fused

GOLDEN = ROOT / "tests" / "golden" / "locality.safetensors"
IMAGES = random_images(3, 3, 32, 32, dtype=torch.float64)


@pytest.fixture
def vits(small_vit):
    """A ViT in float64, with LSA or without; the numbers of its weights depend on the seed."""

    def build(local, seed, **options):
        vit = small_vit(**options)
        return randomise(localise_attention(vit) if local else vit, seed).double()

    return build


def off_diagonal(scores):
    """The map of scores (B, H, N, N) the long way: every row's softmax over the other tokens."""
    p = torch.zeros_like(scores)
    for i in range(scores.shape[-1]):
        others = [j for j in range(scores.shape[-1]) if j != i]
        p[:, :, i, others] = scores[:, :, i, others].softmax(-1)
    return p


# --- The published code


def test_equals_the_published_code():
    golden = load_file(GOLDEN)
    size = {"img_size": 16, "patch_size": 4, "num_classes": 5, "embed_dim": 8, "depth": 2, "num_heads": 2}
    vit = VisionTransformer(**size, mlp_ratio=2, qkv_bias=False, norm_layer=torch.nn.LayerNorm)
    localise_attention(shift_patches(vit)).double().load_state_dict(translated(golden))
    images = golden["images"]
    assert (vit.patch_embed(images) - golden["tokens"]).abs().max() <= 1e-10
    for fused in (True, False):
        set_fused(vit, fused)
        found = walk(vit, images)
        for layer, seen in enumerate(found.layers):
            assert (seen.map - golden[f"map.{layer}"]).abs().max() <= 1e-10
        for logits in (found.logits, vit(images)):
            assert (logits - golden["logits"]).abs().max() <= 1e-10


def translated(golden):
    """The published model's state in timm's names. Its patches are rows, columns, channels: of 15 channels
    and 4 x 4 pixels the number of each in ours is looked up."""
    weight = {name.removeprefix("weight."): x for name, x in golden.items() if name.startswith("weight.")}
    ours = torch.arange(240).reshape(4, 4, 15).permute(2, 0, 1).flatten()
    merging = "to_patch_embedding.merging"
    state = {
        "cls_token": weight["cls_token"],
        "pos_embed": weight["pos_embedding"],
        "patch_embed.norm.weight": weight[f"{merging}.1.weight"][ours],
        "patch_embed.norm.bias": weight[f"{merging}.1.bias"][ours],
        "patch_embed.proj.weight": weight[f"{merging}.2.weight"][:, ours],
        "patch_embed.proj.bias": weight[f"{merging}.2.bias"],
    }
    names = {"0.norm": "norm1", "0.fn.to_qkv": "attn.qkv", "0.fn.to_out.0": "attn.proj"}
    names |= {"1.norm": "norm2", "1.fn.net.0": "mlp.fc1", "1.fn.net.3": "mlp.fc2"}
    for layer in range(2):
        for theirs, mine in names.items():
            for kind in ("weight", "bias"):
                if (x := weight.get(f"transformer.layers.{layer}.{theirs}.{kind}")) is not None:
                    state[f"blocks.{layer}.{mine}.{kind}"] = x
        state[f"blocks.{layer}.attn.sharpness"] = weight[f"transformer.layers.{layer}.0.fn.scale"]
    for kind in ("weight", "bias"):
        state[f"norm.{kind}"] = weight[f"mlp_head.0.{kind}"]
        state[f"head.{kind}"] = weight[f"mlp_head.1.{kind}"]
    return state


@pytest.mark.parametrize(
    "options", [DROPS, {"qk_norm": True, "scale_attn_norm": True, "init_values": 0.1}], ids=str
)
def test_walks_as_the_model_computes(small_vit, options):
    vit = randomise(localise_attention(small_vit(**options))).train()
    assert_same_logits(vit, IMAGES.float(), 1e-6)
    for seen in walk(vit.eval(), IMAGES.float()).layers:
        assert (seen.map.diagonal(dim1=-2, dim2=-1) == 0).all(), "exactly"
        torch.testing.assert_close(seen.map.sum(-1), torch.ones(3, 3, 17))
        torch.testing.assert_close(seen.map, off_diagonal(seen.scores), rtol=0, atol=1e-6)


def test_reduced_precision_stays_finite(small_vit):
    vit, images = randomise(localise_attention(small_vit())), IMAGES.float()
    with torch.autocast("cpu", torch.bfloat16):
        for fused in (True, False):
            found = walk(set_fused(vit, fused), images)
            torch.testing.assert_close(found.logits, vit(images), rtol=0, atol=0)
            assert found.logits.isfinite().all()
        loss = attention_cross_entropy(found.layers, walk(randomise(small_vit(), 1), images).layers)
    loss.backward()
    assert loss.isfinite() and vit.blocks[0].attn.sharpness.grad.isfinite().all()
    halved = set_fused(vit.half(), False)
    for seen in walk(halved, images.half()).layers:
        assert seen.map.isfinite().all() and (seen.map.diagonal(dim1=-2, dim2=-1) == 0).all()


# --- With a teacher: (teacher, student) with LSA or without

PAIRS = pytest.mark.parametrize("of_teacher, of_student", [(False, True), (True, False), (True, True)])
PLANS = {"some heads of one layer": {"heads": (0, 2), "layers": (1,)}, "average": {"average": "heads"}}


def expected_maps(teacher, plan, masked):
    """What a student is to see or learn: the teacher's maps, off the diagonal where one has none."""
    layers = walk(teacher, IMAGES).layers
    maps = [off_diagonal(x.scale * x.q @ x.k.mT) if masked[0] else x.map for x in layers]
    if plan.average == "heads":
        maps = [p.mean(1, keepdim=True).expand_as(p) for p in maps]
    return [off_diagonal(p.log()) for p in maps] if masked[1] else maps


@PAIRS
@pytest.mark.parametrize("name", PLANS)
def test_copy(vits, of_teacher, of_student, name):
    plan = Plan(**PLANS[name])
    teacher, student = vits(of_teacher, 1), vits(of_student, 2)
    pair = AttentionTransfer(teacher, student, plan)
    found = pair.walk(IMAGES).layers
    for layer, p in enumerate(expected_maps(teacher, plan, (of_teacher, of_student))):
        if layer in (plan.layers or range(3)):
            heads = list(plan.heads or range(3))
            assert (found[layer].map[:, heads] - p[:, heads]).abs().max() <= 1e-10
        if of_student:
            assert (found[layer].map.diagonal(dim1=-2, dim2=-1) == 0).all()
    assert pair.path == ("dense" if name == "average" or of_teacher else "map-free")


@PAIRS
@pytest.mark.parametrize("name", PLANS)
def test_distill(vits, of_teacher, of_student, name):
    """The loss against sums over the tokens that are left; it is finite, and sharpness learns from it."""
    plan = Plan(how="distill", **PLANS[name])
    teacher, student = vits(of_teacher, 1), vits(of_student, 2)
    loss = AttentionTransfer(teacher, student, plan)(IMAGES).transfer_loss
    seen, expected = walk(student, IMAGES).layers, 0.0
    for layer, p_t in enumerate(expected_maps(teacher, plan, (of_teacher, of_student))):
        if layer in (plan.layers or range(3)):
            heads = list(plan.heads or range(3))
            p_s = seen[layer].map
            assert (p_t[p_s == 0] == 0).all(), "nothing is asked for that the student cannot give"
            terms = torch.where(p_t > 0, -p_t * p_s.log(), 0.0)
            expected = expected + terms[:, heads].sum(-1).mean()
    assert loss.isfinite() and abs(loss - expected) <= 1e-10
    loss.backward()
    if of_student:
        assert (student.blocks[1].attn.sharpness.grad[list(plan.heads or range(3))] != 0).all()
