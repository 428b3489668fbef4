"""What notebook 20 writes out, shifted patches, LSA, a ResMLP block and an attention pool, is what atlib and
timm compute, on other inputs than the notebook's; the accuracies that its sentences name are those of the
student whose maps are cut."""

import re

import pytest
import torch
from timm.layers import Attention

from atbook.lab.scales import scales
from atbook.records import results_folder
from atlib import walk
from atlib.checkpoint import load_vit
from atlib.methods.locality import LocalityAttention, with_shifts
from atlib.methods.patch_conv import AttentionPool
from atlib.methods.resmlp import resmlp
from atlib.walking import Instead
from tests.book.test_taught import NOTEBOOKS, taught
from tests.helpers import randomise

NAME = "20-where-tokens-come-from"


@pytest.mark.parametrize("height, width, p", [(32, 32, 8), (24, 40, 4)])
def test_five_images_are_the_image_and_its_shifts(height, width, p):
    images = torch.randn(3, 3, height, width)
    assert torch.equal(taught(NAME).five_images(images, p), with_shifts(images, (p, p)))


def test_locality_attention_is_the_module():
    torch.manual_seed(1)
    attn = randomise(LocalityAttention(Attention(24, num_heads=3, qkv_bias=True)), 2).double().eval()
    attn.sharpness.data = torch.tensor([0.1, 0.4, 2.0], dtype=torch.float64)
    x = torch.randn(2, 7, 24, dtype=torch.float64)
    q, k, v = attn.qkv(x).reshape(2, 7, 3, 3, 8).permute(2, 0, 3, 1, 4)
    mixed, p = taught(NAME).locality_attention(q, k, v, 1 / attn.sharpness)
    assert torch.allclose(attn.proj(mixed.transpose(1, 2).flatten(2)), attn(x), atol=1e-10)
    assert torch.equal(p.diagonal(dim1=-2, dim2=-1), torch.zeros(2, 3, 7, dtype=torch.float64))
    assert torch.allclose(p.sum(-1), torch.ones(2, 3, 7, dtype=torch.float64))


def test_mixing_by_loops_is_a_resmlp_block():
    block = randomise(resmlp(24, 8, embed_dim=12, depth=2, num_classes=3), 3).double().eval().blocks[1]
    x = torch.randn(2, 9, 12, dtype=torch.float64)
    assert torch.allclose(taught(NAME).resmlp_block(block, x), block(x), atol=1e-10)
    A, bias = block.linear_tokens.weight, block.linear_tokens.bias
    expected = torch.einsum("ij,bjd->bid", A, x) + bias[:, None]
    assert torch.allclose(taught(NAME).mix_by_loops(A, bias, x), expected, atol=1e-10)


def test_attention_pool_is_the_pool():
    pool, patches = randomise(AttentionPool(12), 4).double().eval(), torch.randn(3, 9, 12).double()
    gathered, row = taught(NAME).attention_pool(pool, patches)
    pooled, map = pool(patches)
    assert torch.allclose(row, map[:, 0], atol=1e-10) and row.shape == (3, 1, 10)
    gathered = pool.queries + pool.scale1(pool.proj(gathered))
    assert torch.allclose(gathered + pool.scale2(pool.mlp(pool.norm2(gathered))), pooled, atol=1e-10)


# --- The sentences about a student whose maps are cut ---


@torch.no_grad()
def kept(world):
    """Accuracy, in per cent, with whole maps, without diagonals, with one row, with mean maps, and without
    the diagonals of patches; and the class token's weight on itself, by layer."""
    folder = results_folder() / "transfer" / world
    teacher, student = (load_vit(folder / f"{name}-seed0.safetensors").eval() for name in ("teacher", "copy"))
    images, labels = scales()[world].held_out("test").take(range(1000))
    known, _ = scales()[world].labelled(seed=0).take(range(1000))
    whole = [seen.map for seen in walk(teacher, images).layers]
    means = [seen.map.mean(0).expand(1000, -1, -1, -1) for seen in walk(teacher, known).layers]
    off = 1 - torch.eye(17)
    without = [p * off / (p * off).sum(-1, keepdim=True) for p in whole]
    row = [*means[:3], torch.cat([whole[3][:, :, :1], means[3][:, :, 1:]], 2)]
    accuracies = []
    patches = [torch.cat([p[:, :, :1], q[:, :, 1:]], 2) for p, q in zip(whole, without)]
    for maps in (whole, without, row, means, patches):
        replace = {layer: Instead(map=p) for layer, p in enumerate(maps)}
        right = walk(student, images, replace=replace).logits.argmax(1) == labels
        accuracies.append(100 * right.float().mean().item())
    return accuracies, [p[:, :, 0, 0].mean().item() for p in whole]


def test_what_the_sentences_say_of_cut_maps():
    find, of_class = kept("find")
    match, _ = kept("match")
    text = " ".join((NOTEBOOKS / f"{NAME}.md").read_text(encoding="utf-8").split())
    numbers = [float(number) for number in re.findall(r"(\d+\.\d) %", text)]
    for value in (*match[:4], find[1]):
        assert any(abs(number - value) < 0.31 for number in numbers), value
    (lost, of_match, more, of_find) = map(
        float,
        re.search(
            r"costs one student .*?(\d+\.\d) of (\d+\.\d) points, .*?, (\d+\.\d) of (\d+\.\d) if", text
        ).groups(),
    )
    assert [lost, of_match] == pytest.approx([match[0] - match[1], match[0]], abs=0.3)
    assert [more, of_find] == pytest.approx([find[0] - find[1], find[0]], abs=0.3)
    share = int(re.search(r"in layer 2 it gives (\d+) % to itself", text)[1])
    assert share == pytest.approx(100 * of_class[2], abs=0.6) and max(of_class) == of_class[2]
    assert max(find[2], find[3]) < 14 and match[2] > match[0] - 2 and find[4] > find[0] - 1
