"""Any model that makes the call, against transformers' eager attention and softmax written out."""

import inspect
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.models import checkpoint_seq
from timm.models.eva import Eva
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from atlib import AttentionTransfer, Plan, create_vit, walk
from atlib.attention import SDPA, Instead, find_projections
from tests.helpers import SMALL_VIT, random_images, random_maps, randomise, since_torch_11

# Depth, width and image size are cut: what makes a family a family stays as published.
OF_TIMM = {
    "vit_tiny_patch16_224": {}, "vit_small_patch14_reg4_dinov2": {}, "deit_tiny_distilled_patch16_224": {},
    "vit_tiny_r_s16_p8_224": {"img_size": 224, "embed_dim": 192}, "vit_small_patch16_dinov3": {},
    "eva02_tiny_patch14_224": {}, "vit_base_patch16_rope_mixed_224": {}, "vit_pe_core_tiny_patch16_384": {},
    "beit_base_patch16_224": {}, "vit_relpos_small_patch16_224": {},
    "naflexvit_base_patch16_gap": {"img_size": None},
    "vit_base_patch16_sapiens2": {"num_kv_heads": 2, "num_heads": 4},
}  # fmt: skip
# What a class of timm can be built with, on a small ViT.
MADE = {
    "query-key norm": (create_vit, {"qk_norm": True}),
    "attention-pool head": (create_vit, {"global_pool": "map", "class_token": False}),
    "another image size": (create_vit, {"dynamic_img_size": True}),
    "three projections": (Eva, {"use_rot_pos_emb": True, "qkv_fused": False}),
    "shared keys and values": (Eva, {"attn_type": "rope", "qkv_fused": False, "num_kv_heads": 1}),
}


def built(name):
    if name in MADE:
        build, options = MADE[name]
        if build is Eva and options.keys() - inspect.signature(Eva).parameters.keys():
            pytest.skip(f"this timm has no {options}")
        sizes = SMALL_VIT | {"depth": 2} | options
        return randomise(create_vit(sizes) if build is create_vit else build(**sizes)).eval()
    if not timm.is_model(name):
        pytest.skip(f"this timm has no {name}")
    options = {"depth": 2, "embed_dim": 48, "num_heads": 3, "num_classes": 5, "img_size": 112} | OF_TIMM[name]
    options = {key: value for key, value in options.items() if value is not None}
    return randomise(timm.create_model(name, **options)).eval()


class Written:
    """Attention written out, in place of torch's: the maps of every call."""

    def __init__(self):
        self.maps = []

    def __call__(self, q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        heads = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(heads, 1), v.repeat_interleave(heads, 1)
        z = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            z = z.masked_fill(torch.ones_like(z[0, 0]).triu(1).bool(), -torch.inf)
        if attn_mask is not None:
            z = z.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else z + attn_mask
        self.maps.append(z.softmax(-1))
        return self.maps[-1] @ v


def written_out(model, images, monkeypatch):
    by_hand = Written()
    with monkeypatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", by_hand)
        with torch.no_grad():
            model(images)
    return [p for p in by_hand.maps if p.shape[-1] == p.shape[-2]]


@pytest.mark.parametrize("name", [*OF_TIMM, *MADE])
def test_a_model_of_timm(name, monkeypatch):
    """Exactly its own output with nothing and with its own q and k in place, its maps, and those alone."""
    model = built(name)
    sides = {"vit_tiny_r_s16_p8_224": [224, 224], "another image size": [40, 24]}
    images = random_images(2, 3, *sides.get(name, [32, 32] if name in MADE else [112, 112]))
    expected = written_out(model, images, monkeypatch)
    with torch.no_grad():
        own = model(images)
        found = walk(model, images)
        _, projections = find_projections(model, images)
        replace = {i: Instead(q=x.q, k=x.k, scale=x.scale, bias=x.bias) for i, x in enumerate(found.layers)}
        again = walk(model, images, replace=replace, projections=projections)
        for part in model.modules():
            if hasattr(part, "fused_attn"):
                part.fused_attn = False
        unfused = walk(model, images).layers
    assert torch.equal(found.logits, own) and own.std() > 0.05
    torch.testing.assert_close(again.logits, own, rtol=1e-5, atol=1e-5)
    assert len(found.layers) == len(expected) == len(found.stream) == 2
    for seen, p, other in zip(found.layers, expected, unfused):
        assert (seen.map - p).abs().max() <= 1e-5 and torch.equal(other.map, seen.map)
    if name == "attention-pool head":
        assert found.passed == ("AttentionPoolLatent",)


# --- transformers, torchvision, open_clip

IMAGES = random_images(2, 3, 32, 32)


def of_transformers(attention):
    return pytest.importorskip("tools.other_libraries").models(attention)


try:
    import open_clip  # noqa: F401
    import transformers  # noqa: F401

    OTHERS = list(of_transformers("sdpa"))
except ImportError:
    OTHERS = []


def order_of(model):
    """Of transformers' masked auto-encoder, which shuffles patches else."""
    return {"noise": torch.arange(16.0).expand(2, -1)} if "MAE" in type(model).__name__ else {}


def output_of(model, images):
    output = model(images, **order_of(model))
    names = ("logits", "image_embeds", "last_hidden_state")
    return next((x for name in names if (x := getattr(output, name, None)) is not None), output)


@pytest.mark.parametrize("name", OTHERS)
@torch.no_grad()
def test_a_model_of_another_library(name):
    """Its own output, and the maps of eager attention, from which it is switched while it is walked."""
    model = randomise(of_transformers("sdpa")[name]()).eval()
    own, found = output_of(model, IMAGES), walk(model, IMAGES)
    assert torch.equal(found.logits, own) and own.std() > 1e-3
    assert len(found.layers) == 3 and found.layers[0].q.shape[1] == 3
    torch.testing.assert_close(walk(model, IMAGES, stop_after=1).layers[1].map, found.layers[1].map)
    if name.startswith("transformers"):
        eager = randomise(of_transformers("eager")[name]()).eval()
        found = found if "Data2Vec" in name else walk(eager, IMAGES)
        expected = eager(IMAGES, output_attentions=True, **order_of(eager)).attentions
        for seen, p in zip(found.layers, expected, strict=True):
            assert (seen.map - p).abs().max() <= 1e-5
            assert p.amax() > 0.15, "a flat map (1 / 17) would hide a wrong scale or bias"


@pytest.mark.parametrize("name, how", zip(OTHERS, cycle(["copy", "distill"])))
def test_two_models_of_another_library(name, how):
    """The student's logits with the teacher's whole maps put in; the cross-entropy of maps written out."""
    teacher, student = (randomise(of_transformers("sdpa")[name](), seed=seed).eval() for seed in (0, 1))
    pair = AttentionTransfer(teacher, student, Plan(how=how)).eval()
    found = pair(IMAGES)
    with torch.no_grad():
        maps = [seen.map for seen in walk(teacher, IMAGES).layers]
        own = [seen.map for seen in walk(student, IMAGES).layers]
    if how == "copy":
        expected = walk(student, IMAGES, replace={i: Instead(map=p) for i, p in enumerate(maps)}).logits
        assert (found.logits - expected).abs().max() <= 1e-4 * expected.abs().max()
        assert (found.logits - output_of(student, IMAGES)).abs().max() > 1e-3
    else:
        dense = sum(-(p * q.log()).sum(-1).mean() for p, q in zip(maps, own))
        assert found.transfer_loss.item() == pytest.approx(dense.item(), rel=1e-4)
    (found.logits.square().mean() + found.transfer_loss).backward()
    assert all(weight.grad is None for weight in teacher.parameters())
    assert any(weight.grad is not None and weight.grad.abs().max() > 0 for weight in student.parameters())


# --- beyond Vision Transformers


def text(kind):
    hf = pytest.importorskip("transformers")
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 32}
    torch.manual_seed(0)
    if kind == "causal, grouped queries":
        sizes |= {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
        config = hf.LlamaConfig(**sizes, vocab_size=50)
        return hf.LlamaForCausalLM(config).eval()
    return hf.BertForSequenceClassification(hf.BertConfig(**sizes, vocab_size=50, num_labels=5)).eval()


@pytest.mark.parametrize("kind", ["causal, grouped queries", "encoder"])
def test_a_model_of_language(kind):
    words = torch.randint(0, 50, (2, 7), generator=torch.Generator().manual_seed(0))
    model, teacher = randomise(text(kind)), randomise(text(kind), seed=1)
    with torch.no_grad():
        found = walk(model, words)
        assert torch.equal(found.logits, model(words).logits)
        model.set_attn_implementation("eager")
        expected = model(words, output_attentions=True).attentions
        model.set_attn_implementation("sdpa")
    for seen, p in zip(found.layers, expected, strict=True):
        assert (seen.map - p).abs().max() <= 1e-5 and (seen.mask is not None) == (kind != "encoder")
    for how in ("copy", "distill"):
        logits, loss = AttentionTransfer(teacher, model, Plan(how=how))(words)
        assert logits.isfinite().all() and loss.isfinite() and (loss > 0) == (how == "distill")


# --- what a walk has to hold under


def test_grouped_queries_are_repeated_and_causal_attention_stays_causal():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.kv, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 5)

        def forward(self, x):
            q = self.q(x).unflatten(-1, (4, 2)).transpose(1, 2)
            k, v = self.kv(x).unflatten(-1, (2, 2, 2)).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return self.head(mixed.transpose(1, 2).flatten(2))

    model, x = randomise(Own()), random_images(2, 6, 8)
    seen = walk(model, x).layers[0]
    assert seen.map.triu(1).abs().max() == 0 and seen.mask.shape == (6, 6) and seen.bias is None
    torch.testing.assert_close(model.head((seen.map @ seen.v).transpose(1, 2).flatten(2)), model(x))
    for other in (Instead(*torch.randn(2, 2, 4, 6, 2)), Instead(map=torch.rand(2, 4, 6, 6).softmax(-1))):
        again = walk(model, x, replace={0: other}).layers[0]
        assert again.map.triu(1).abs().max() == 0, "what the layer forbids stays forbidden"


def test_masks_of_any_form_are_masks_and_numbers_are_a_bias():
    class Own(nn.Linear):
        def forward(self, x):
            q = super().forward(x)[:, None]
            return F.scaled_dot_product_attention(q, q, q, attn_mask=added)[:, 0]

    allowed = torch.rand(5, 5, generator=torch.Generator().manual_seed(0)) > 0.4
    allowed |= torch.eye(5, dtype=torch.bool)
    per_image, bias = torch.stack([allowed, allowed.mT, allowed])[:, None], nn.Parameter(torch.randn(5, 5))
    infinite = torch.zeros(5, 5).masked_fill(~allowed, -torch.inf)
    for added in (allowed, allowed[None, None].expand(3, 1, 5, 5), infinite, per_image):
        seen = walk(Own(4, 4), random_images(3, 5, 4)).layers[0]
        assert seen.bias is None and seen.mask.isfinite().all()
        assert seen.mask.shape == ((3, 1, 5, 5) if added is per_image else (5, 5))
        assert torch.equal(seen.map > 0, (per_image if added is per_image else allowed).expand(3, 1, 5, 5))
    added = bias
    seen = walk(Own(4, 4), random_images(3, 5, 4)).layers[0]
    assert seen.bias is bias and seen.mask is None
    padding = allowed[:3, None, None, :] | (torch.arange(5) == 0)
    for added in (padding, torch.zeros(3, 1, 1, 5).masked_fill(~padding, -torch.inf)):
        seen = walk(Own(4, 4), random_images(3, 5, 4)).layers[0]
        assert seen.bias is None and added.shape == padding.shape
        assert torch.equal(seen.map > 0, padding.expand(3, 1, 5, 5))
    # as where distances are a bias, and the future is none
    added = bias.detach().masked_fill(~allowed, -torch.inf)
    seen = walk(Own(4, 4), random_images(3, 5, 4)).layers[0]
    assert torch.equal(seen.bias, bias.detach().masked_fill(~allowed, 0)) and seen.scores.isfinite().all()
    scores = seen.scale * seen.q @ seen.k.mT + added
    torch.testing.assert_close(seen.map, scores.softmax(-1))


def vits(**options):
    return (randomise(create_vit(SMALL_VIT, **options), seed=seed) for seed in (1, 2))


def gradients_of(model):
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("how", ["copy", "distill"])
@pytest.mark.parametrize("every", [1, 2])
def test_activation_checkpointing_changes_no_gradient(how, every):
    """Of two forwards before one backward pass, with other images; also where two blocks go together."""
    found = []
    for checkpointing in (False, True):
        teacher, student = vits(drop_path_rate=0.4)
        if checkpointing:
            blocks = [*student.blocks]
            student.blocks.forward = lambda x, blocks=blocks: checkpoint_seq(blocks, x, every=every)
        pair = AttentionTransfer(teacher, student, Plan(how=how)).train()
        torch.manual_seed(3)
        losses = []
        for images in (IMAGES.clone(), IMAGES.flip(0) + 1):
            output = pair(images)
            losses.append(output.logits.square().mean() + output.transfer_loss)
        (losses[0] + 2 * losses[1]).backward()
        found.append(gradients_of(student))
        assert F.scaled_dot_product_attention is SDPA, "the swap is over"
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("plan", [Plan(), Plan(how="distill")], ids=str)
@since_torch_11
def test_a_pair_compiles_in_one_graph(plan):
    found = []
    for compiled in (False, True):
        pair = AttentionTransfer(*vits(depth=2), plan).train()
        torch._dynamo.reset()
        run = torch.compile(pair, fullgraph=True, backend="aot_eager") if compiled else pair
        out = run(IMAGES)
        (out.logits.square().mean() + out.transfer_loss).backward()
        found.append((out.logits.detach(), out.transfer_loss.detach(), gradients_of(pair.student)))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)
    assert F.scaled_dot_product_attention is SDPA


def test_other_threads_pass_through():
    """Two walks at a time see what they see alone, and a model that is not walked computes what it does."""
    teacher, student = vits()
    maps = {i: Instead(map=seen.map) for i, seen in enumerate(walk(teacher, IMAGES).layers)}
    asked = {
        "teacher": lambda: walk(teacher, IMAGES).logits,
        "copy": lambda: walk(student, IMAGES, replace=maps).logits,
        "student": lambda: walk(student, IMAGES).logits,
        "plain": lambda: student(IMAGES),
    }
    with ThreadPoolExecutor(4) as pool:
        alone = {name: ask() for name, ask in asked.items()}
        together = {n: pool.submit(lambda ask=ask: [ask() for _ in range(20)]) for n, ask in asked.items()}
    for name, results in together.items():
        assert all(torch.equal(one, alone[name]) for one in results.result()), name
    assert F.scaled_dot_product_attention is SDPA


# --- what is not computed


@pytest.mark.parametrize("build", [create_vit, Eva], ids=["plain", "rotary"])
def test_rows_that_nobody_reads_are_not_multiplied(build):
    """Of q and k where a map stands in their place: also where they are rotated after they are projected."""
    sizes = SMALL_VIT | {"depth": 2}
    model = randomise(create_vit(sizes) if build is create_vit else Eva(**sizes, use_rot_pos_emb=True)).eval()
    _, projections = find_projections(model, IMAGES)
    replace = {i: Instead(map=random_maps(2, 3, 17, 17).float()) for i in (0, 1)}

    def counted(**options):
        with FlopCounterMode(display=False) as counter:
            walk(model, IMAGES, replace=replace, **options)
        return counter.get_total_flops()

    assert counted() - counted(projections=projections) == 2 * 2 * (2 * 17) * 24 * 48
