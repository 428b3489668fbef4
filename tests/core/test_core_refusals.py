"""Bad inputs: what is raised, with one word of the message where another error could be taken for it."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer

from atlib import AttentionTransfer, Plan, create_student, create_vit, walk
from atlib.attention import Instead, Kept, Seen, Unwalkable, sample_drop_path
from atlib.baselines import feature_mse, hard_distillation, soft_distillation
from atlib.checkpoint import load_bundle, load_vit, save_bundle, save_vit
from atlib.data import Images
from atlib.evaluate import evaluate
from atlib.losses import (
    attention_cross_entropy,
    dense_attention_cross_entropy,
    map_cross_entropy,
    projection_mse,
)
from atlib.maps import (
    aggregate_heads,
    average_over,
    keep_tokens,
    mean_heads,
    pool_heads,
    resample,
    resample_class_attention,
)
from atlib.pair import Normalisation, attach, check_images
from atlib.recipe import Recipe
from atlib.train import train
from atlib.vit import Architecture, WeightsUnavailable, walk_tokens
from tests.helpers import SMALL_VIT, random_images, random_maps, randomise

SMALL = SMALL_VIT | {"depth": 2}
IMAGES = random_images(2, 3, 32, 32)


def refused(call, error, word=None):
    with pytest.raises(error, match=word):
        call()


# --- plans

PLANS = [
    {"what": "query"}, {"what": "maps"}, {"how": "distil"}, {"how": None}, {"average": "layer"},
    {"average": "examples"}, {"average": False}, {"unequal_heads": "mean"}, {"unequal_grid": True},
    {"unequal_prefix": "remove"}, {"layers": {}}, {"layers": []}, {"layers": [1, 1]}, {"layers": [0, -1]},
    {"layers": [0.0]}, {"layers": [True]}, {"layers": "01"}, {"layers": -1}, {"layers": 3},
    {"layers": {-1: 0}}, {"layers": {0: -2}}, {"layers": {0: 1.0}}, {"layers": {0: None}}, {"heads": []},
    {"heads": [0, 0]}, {"layers": [[0, 1], [0, 0]]}, {"heads": 3}, {"heads": [-1]}, {"heads": {0: []}},
    {"heads": {0: 1}}, {"heads": {0: [True]}}, {"heads": {-1: [0]}}, {"what": "q", "average": "heads"},
    {"what": "k", "unequal_heads": "average"}, {"what": "v", "unequal_grid": "resample"},
    {"what": "q", "unequal_prefix": "drop"}, {"heads": [0], "unequal_heads": "aggregate"},
    {"how": "copy", "unequal_heads": "learn"}, {"rows": "class token"}, {"what": "q", "rows": "class"},
    {"what": "v", "unequal_prefix": "own"}, {"rows": "class", "average": "queries"},
    {"rows": "patches", "unequal_heads": "average"}, {"unequal_prefix": "own", "average": "heads"},
    {"unequal_prefix": "own", "unequal_heads": "aggregate"},
]  # fmt: skip


@pytest.mark.parametrize("arguments", PLANS, ids=str)
def test_plans(arguments):
    refused(lambda: Plan(**arguments), ValueError, list(arguments)[-1].split("_")[0].rstrip("s"))


# --- a pair, a walk, what is put in the place of a layer's parts


def vit(seed=0, **options):
    return randomise(create_vit(SMALL | options), seed).eval()


def pair(plan, student=None, **teacher):
    return AttentionTransfer(vit(1, **teacher), vit(2, **student or {}), plan)


def one_model():
    return AttentionTransfer(same := vit(), same, Plan())


def replaced_later():
    changed = pair(Plan(how="distill"))
    changed.student = vit()
    return changed(IMAGES)


@pytest.mark.parametrize(
    "call, word",
    [
        (one_model, "same"),
        (replaced_later, "replaced"),
        (lambda: pair(Plan())(random_images(2, 1, 3, 32, 32)), ""),
        (lambda: pair(Plan())(random_images(2, 3, 3, 32, 32)), ""),
        (lambda: check_images(vit(), torch.zeros(1, 1, 32, 32)), "3 channels"),
        (lambda: pair(Plan(layers=[1, 2])), "layer 2"),
        (lambda: pair(Plan(layers={0: 2})), "teacher"),
        (lambda: pair(Plan(heads=[1, 3])), "head 3"),
        (lambda: pair(Plan(heads={1: [5]})), "head 5"),
        (lambda: pair(Plan(layers=[0], heads={1: [0]})), "heads"),
        (lambda: pair(Plan(layers=[1], average="layers")), "average"),
        (lambda: pair(Plan(unequal_grid="resample"), patch_size=32), "grid"),
        (lambda: pair(Plan(unequal_grid="resample"), {"patch_size": 32}), "grid"),
        (lambda: pair(Plan(unequal_prefix="drop"), reg_tokens=2, init_values=0.1), "layer_scale"),
        (lambda: Plan(layers=[2]).pairs_of(2, 4), "layer 2"),
        (lambda: Plan(layers={0: 4}).pairs_of(2, 4), "layer 4"),
        (lambda: Plan(heads={1: [3]}).heads_of(1, 3), "head 3"),
        (lambda: Normalisation((0.5, 0.5), 0.5), "mean"),
        (lambda: Normalisation(0.5, 0.0), "std"),
        (lambda: Normalisation("x", 1), ""),
        (lambda: Normalisation(0.5, (1, 1, -1)), "std"),
        (lambda: walk(vit(), IMAGES, replace={2: Instead()}), "depth"),
        (lambda: walk(vit(), IMAGES, replace={-1: Instead()}), "depth"),
        (lambda: walk(vit(), IMAGES, stop_after=7), "depth"),
        (lambda: walk_tokens(vit(), torch.randn(1, 17, 24), stop_after=2), "depth"),
        (lambda: walk(vit(), IMAGES, drop_path=sample_drop_path(vit(depth=1), IMAGES)), "depth"),
        (lambda: create_student(VisionTransformer(**SMALL), 7), "name"),
        (lambda: create_student(torch.nn.Linear(3, 3), 7), "name"),
        (lambda: create_student(create_vit(SMALL), 7, embed_dim=20), "20"),
        (lambda: create_student(create_vit(SMALL), 7, size="tinyy"), "tinyy"),
        (lambda: Architecture.read({"name": "hf-hub:a/b"}), ""),
        (lambda: Architecture.read({"name": "../vit"}), ""),
        (lambda: Architecture.read({"name": ["a"]}), ""),
        (lambda: Architecture.read({"name": "glyphs", "more": 1}), ""),
        (lambda: Architecture.read(None), ""),
        (lambda: Architecture.read({"overrides": {}}), ""),
        (lambda: create_vit("vit_tny_patch16_224"), "vit_tiny_patch16_224"),
        (lambda: create_vit("glyph"), "glyphs"),
        (lambda: create_vit("vit_base_patch16_224.may"), ".mae"),
        (lambda: create_vit("resnet18"), "ResNet"),
        (lambda: create_vit("glyphs", pretrained=True), ""),
        (lambda: create_vit({"img_size": 32}, pretrained=True), ""),
        (lambda: create_vit("vit_small_patch14_dinov2", img_size=56, init_values=None), "init_values"),
    ],
)
def test_values(call, word):
    refused(call, ValueError, word or None)


def changed(module):
    module.blocks[0].extra = torch.nn.Parameter(torch.zeros(3))
    return module


def two_activations(module):
    module.blocks[0].mlp.act = torch.nn.ReLU()
    return module


@pytest.mark.parametrize("change, word", [(changed, "extra"), (two_activations, "activation")])
def test_a_teacher_that_was_changed_after_it_was_built(change, word):
    refused(lambda: create_student(change(create_vit(SMALL)), 7), ValueError, word)


class Own(torch.nn.Module):
    not_walkable = "a sieve"


@pytest.mark.parametrize(
    "call, word",
    [
        (lambda: walk(pair(Plan()), IMAGES), "student"),
        (lambda: walk(Own(), IMAGES), "sieve"),
        (lambda: walk_tokens(Eva(**SMALL, use_rot_pos_emb=True), torch.randn(1, 17, 24)), "Eva"),
    ],
)
def test_what_cannot_be_walked(call, word):
    refused(call, Unwalkable, word)


def test_weights_that_are_nowhere(tmp_path, monkeypatch, no_network):
    monkeypatch.setattr("torch.hub._hub_dir", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    for name in ("vit_tiny_patch16_224", "vit_huge_patch14_gap_224.in1k_ijepa", "vit_base_patch16_xp_224"):
        small = {"depth": 1, "embed_dim": 24, "num_heads": 2}
        refused(lambda name=name: create_vit(name, pretrained=True, **small), WeightsUnavailable)


REPLACEMENTS = [
    ({"q": (2, 3, 17, 9)}, "q"), ({"k": (2, 4, 17, 8)}, "k"), ({"v": (1, 3, 17, 8)}, "v"),
    ({"map": (2, 3, 16, 17)}, "map"), ({"q": (2, 3, 17, 6), "k": (2, 3, 17, 5)}, "k"),
    ({"q": (2, 3, 17, 6), "k": (2, 3, 17, 6), "v": (2, 3, 17, 6)}, "v"),
    ({"map": (2, 3, 17, 17), "heads": [0]}, "map"),
    ({"q": (2, 1, 17, 6), "k": (2, 1, 17, 6), "heads": [0]}, "q"),
    ({"map": (2, 3, 17, 17), "q": (2, 3, 17, 8)}, "both"), ({"q": (2, 3, 17, 8), "scale": 0.5}, "scale"),
    ({"k": (2, 3, 17, 8), "scale": 0.5}, "scale"), ({"v": (2, 3, 17, 8), "scale": 0.5}, "scale"),
    ({"map": (2, 3, 17, 17), "scale": 0.5}, "scale"), ({"scale": 0.5}, "scale"),
    ({"kept": Kept((0,), ())}, "map"), ({"map": (2, 1, 17, 17), "heads": [3]}, "heads"),
    ({"map": (2, 1, 17, 17), "heads": [-1]}, "heads"), ({"map": (2, 2, 17, 17), "heads": [1, 1]}, "heads"),
    ({"map": (2, 0, 17, 17), "heads": []}, "heads"),
]  # fmt: skip


@pytest.mark.parametrize("instead, word", REPLACEMENTS, ids=str)
def test_replacements(instead, word):
    given = {
        part: torch.rand(value) if part in ("q", "k", "v", "map") else value
        for part, value in instead.items()
    }
    refused(lambda: walk(vit(), IMAGES, replace={1: Instead(**given)}), ValueError, rf"\b{word}\b")


# --- losses and operations on maps: also shapes that would broadcast silently


def layer(*shape):
    return Seen(*(random_images(*shape, seed=seed) for seed in range(3)), 0.6)


MAP, FOUR = random_maps(1, 2, 3, 3), random_maps(1, 2, 17, 17)
EMPTY = torch.eye(4).expand(1, 2, 4, 4)


@pytest.mark.parametrize(
    "call",
    [
        *(
            lambda loss=loss, shape=shape: loss([layer(2, 3, 4, 4)] * 2, [layer(2, 3, 4, 4), layer(*shape)])
            for loss in (attention_cross_entropy, dense_attention_cross_entropy)
            for shape in ((2, 3, 5, 4), (2, 1, 4, 4), (1, 3, 4, 4))
        ),
        *(
            lambda a=a, b=b: attention_cross_entropy([layer(1, 1, 2, 1)] * a, [layer(1, 1, 2, 1)] * b)
            for a, b in ((1, 2), (2, 1), (0, 0))
        ),
        lambda: map_cross_entropy(layer(2, 3, 4, 4).map.log(), layer(1, 3, 4, 4).map),
        lambda: projection_mse([layer(2, 3, 4, 5)], [layer(2, 1, 4, 5)], "q"),
        lambda: projection_mse([layer(1, 1, 2, 1)], [layer(1, 1, 2, 1)] * 2, "v"),
        lambda: feature_mse([torch.zeros(2, 5, 6)], [torch.zeros(2, 5, 1)]),
        lambda: soft_distillation(torch.zeros(2, 3), torch.zeros(2, 1), 3.0),
        lambda: hard_distillation(torch.zeros(2, 3), torch.zeros(2, 1)),
        *(
            lambda T=T: soft_distillation(torch.zeros(2, 3), torch.zeros(2, 3), T)
            for T in (0.0, -1.0, float("nan"))
        ),
        lambda: (
            walk(vit(), IMAGES, replace={0: Instead(map=random_maps(2, 3, 17, 17).float())}).layers[0].scores
        ),
        lambda: average_over([MAP], "example"),
        lambda: average_over([MAP, random_maps(2, 2, 3, 3)], "examples"),
        lambda: average_over([MAP], "layers"),
        lambda: average_over([MAP, MAP[0]], "heads"),
        aggregate_heads,
        lambda: aggregate_heads(MAP, scores=MAP),
        *(lambda T=T: aggregate_heads(MAP, T) for T in (0, -1.0, float("nan"))),
        lambda: aggregate_heads(MAP[0]),
        lambda: mean_heads(MAP[..., :2]),
        lambda: pool_heads(MAP, "median"),
        lambda: pool_heads(MAP[0], "max"),
        lambda: resample(FOUR, (4, 5), (2, 2), 1),
        lambda: resample(FOUR, (3, 6), (2, 2), -1),
        lambda: resample_class_attention(FOUR[:, :, 0], (4, 5), (2, 2)),
        lambda: resample_class_attention(FOUR, (4, 4), (2, 2)),
        lambda: keep_tokens(EMPTY.roll(1, -1), [2, 3, 0]),  # row 0 gives nothing to these
        *(lambda tokens=tokens: keep_tokens(MAP, tokens) for tokens in ([0, 3], [0, -1], [0, 0], [])),
    ],
)
def test_tensors(call):
    refused(call, ValueError)


# --- files

GLYPHS, OTHER = (Architecture("glyphs", {"depth": depth}) for depth in (1, 2))
HALF, IMAGENET = Normalisation(0.5, 0.5), Normalisation((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def header(path):
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()["atlib"])


def damaged(content, kind):
    length = int.from_bytes(content[:8], "little")
    return {
        "cut off": content[:-1],
        "cut off in the header": content[: length // 2],
        "empty": b"",
        "a web page": b"<html>Not found</html>" * 9,
        "header garbled": content[:20] + b"\xff\xfe" + content[22:],
    }[kind]


@pytest.fixture
def good(tmp_path):
    """A file of a ViT and one of a pair."""
    both = AttentionTransfer(OTHER.build(), GLYPHS.build(), Plan(layers={0: 1}))
    return {
        load_vit: save_vit(tmp_path / "vit.safetensors", both.student, GLYPHS),
        load_bundle: save_bundle(tmp_path / "bundle.safetensors", both, GLYPHS, OTHER),
    }


HEADERS = [
    None, {"format": "pt"}, {"atlib": "{}"}, {"atlib": "[1]"}, {"atlib": "null"}, {"atlib": "not json"},
    {"atlib": '{"architecture": 3, "needs_teacher": true}'}, {"atlib": '{"architecture": {"nam": "glyphs"}}'},
    {"atlib": '{"architecture": {"name": "no such vit"}}'},
]  # fmt: skip
BUNDLES = [
    *({"plan": plan} for plan in ({"how": "teleport"}, {"layer": [0]}, {"layers": [9]}, None)),
    {"teacher": {"name": "glyphs"}},
]


def test_files(good, tmp_path):
    """Each is named, and left as it is."""
    for load, path in good.items():
        content, header_before = path.read_bytes(), header(path)
        tensors = load_file(path)
        for kind in ("cut off", "cut off in the header", "empty", "a web page", "header garbled"):
            path.write_bytes(damaged(content, kind))
            refused(lambda: load(path), OSError, path.name)
            assert path.read_bytes() == damaged(content, kind)
        for metadata in HEADERS:
            save_file(tensors, path, metadata)
            refused(lambda: load(path), OSError, path.name)
        for change in BUNDLES if load is load_bundle else [{"architecture": {"name": "cifar"}}]:
            save_file(tensors, path, {"atlib": json.dumps(header_before | change)})
            refused(lambda: load(path), OSError, path.name)
        path.write_bytes(content)
        refused(lambda: load(tmp_path / "nowhere"), FileNotFoundError, "nowhere")
        refused(lambda: load(tmp_path), OSError)
    refused(lambda: load_vit(good[load_bundle]), OSError, "load_bundle")
    refused(lambda: load_bundle(good[load_vit]), OSError, good[load_vit].name)


def test_architectures_that_are_not_the_models(good, tmp_path):
    """Also one of the same names and shapes, and another function; before anything is written."""
    both, path = load_bundle(good[load_bundle]), tmp_path / "new"
    for other in (Architecture("glyphs"), Architecture("glyphs", {"depth": 1, "num_classes": 9})):
        refused(lambda other=other: save_vit(path, both.student, other), ValueError)
        refused(lambda other=other: save_bundle(path, both, other, OTHER), ValueError)
        refused(lambda other=other: save_bundle(path, both, GLYPHS, other), ValueError)
    for options in ({"num_heads": 2}, {"act_layer": "relu"}):
        same_shapes = create_vit("glyphs", depth=1, **options)
        refused(lambda vit=same_shapes: save_vit(path, vit, GLYPHS), ValueError)
    odd = Architecture("glyphs", {"depth": 1, "cache_dir": "x"})
    refused(lambda: save_vit(path, both.student, odd), ValueError, "cache_dir")
    assert not path.exists()


def test_images_of_another_normalisation():
    images = Images(torch.randint(256, (8, 3, 32, 32), dtype=torch.uint8), torch.arange(8) % 4)
    teacher = vit(num_classes=4)
    attach(teacher, HALF)
    both = AttentionTransfer(teacher, vit(num_classes=4), Plan(how="distill"), normalisation=IMAGENET)
    refused(lambda: evaluate(both, images), ValueError, "normalisation")
    refused(lambda: train(both, images, Recipe(steps=1, batch_size=4), cpu=True), ValueError, "normalisation")
    refused(lambda: both.for_teacher(torch.zeros(2, 1, 32, 32)), ValueError, "channels")
