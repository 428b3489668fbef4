"""Bad inputs: one row for each kind that is refused."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer

from atlib import AttentionTransfer, Plan, create_student, create_vit, losses, maps, walk
from atlib.attention import Instead, Seen, Unwalkable, sample_drop_path
from atlib.baselines import feature_mse, hard_distillation, soft_distillation
from atlib.checkpoint import load_bundle, load_vit, save_bundle, save_vit
from atlib.data import Images
from atlib.evaluate import evaluate
from atlib.pair import IMAGENET, Normalisation, attach
from atlib.recipe import Recipe
from atlib.train import train
from atlib.vit import Architecture, walk_tokens
from tests.helpers import SMALL_VIT, random_images, random_maps, randomise

SMALL = SMALL_VIT | {"depth": 2}
IMAGES = random_images(2, 3, 32, 32)


def refused(call, error=ValueError):
    with pytest.raises(error):
        call()


# --- plans

PLANS = [
    {"what": "query"}, {"how": "distil"}, {"average": "examples"}, {"unequal_heads": "mean"},
    {"unequal_grid": True}, {"unequal_prefix": "remove"}, {"rows": "class token"}, {"layers": []},
    {"layers": [1, 1]}, {"layers": [-1]}, {"layers": [0.0]}, {"layers": [True]}, {"layers": 3},
    {"layers": {0: -2}}, {"layers": [[0, 1], [0, 0]]}, {"heads": [0, 0]}, {"heads": {0: []}},
    {"heads": {-1: [0]}}, {"what": "q", "average": "heads"}, {"what": "v", "unequal_prefix": "own"},
    {"heads": [0], "unequal_heads": "aggregate"}, {"how": "copy", "unequal_heads": "learn"},
    {"rows": "class", "average": "queries"}, {"unequal_prefix": "own", "unequal_heads": "aggregate"},
]  # fmt: skip


@pytest.mark.parametrize("arguments", PLANS, ids=str)
def test_plans(arguments):
    refused(lambda: Plan(**arguments))


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


def student_of_a_changed_teacher():
    teacher = create_vit(SMALL)
    teacher.blocks[0].extra = torch.nn.Parameter(torch.zeros(3))
    return create_student(teacher, 7)


class Own(torch.nn.Module):
    not_walkable = "a sieve"


VALUES = {
    "teacher is student": one_model,
    "student replaced later": replaced_later,
    "three images": lambda: pair(Plan())(random_images(2, 3, 3, 32, 32)),
    "no such layer": lambda: pair(Plan(layers=[1, 2])),
    "no such layer of the teacher": lambda: pair(Plan(layers={0: 2})),
    "no such head": lambda: pair(Plan(heads=[1, 3])),
    "heads of another layer": lambda: pair(Plan(layers=[0], heads={1: [0]})),
    "one layer to average": lambda: pair(Plan(layers=[1], average="layers")),
    "one row of patches": lambda: pair(Plan(unequal_grid="resample"), patch_size=32),
    "other components": lambda: pair(Plan(unequal_prefix="drop"), reg_tokens=2, init_values=0.1),
    "channels of a mean": lambda: Normalisation((0.5, 0.5), 0.5),
    "a deviation of 0": lambda: Normalisation(0.5, 0.0),
    "no layer to replace": lambda: walk(vit(), IMAGES, replace={2: Instead()}),
    "no layer -1": lambda: walk(vit(), IMAGES, replace={-1: Instead()}),
    "no layer to stop at": lambda: walk(vit(), IMAGES, stop_after=7),
    "masks of one layer": lambda: walk(vit(), IMAGES, drop_path=sample_drop_path(vit(depth=1), IMAGES)),
    "a teacher without a name": lambda: create_student(VisionTransformer(**SMALL), 7),
    "a teacher that was changed": student_of_a_changed_teacher,
    "an address": lambda: Architecture.read({"name": "hf-hub:a/b"}),
    "a path": lambda: Architecture.read({"name": "../vit"}),
    "an unknown part": lambda: Architecture.read({"name": "glyphs", "more": 1}),
    "no ViT": lambda: create_vit("resnet18"),
    "weights of a preset": lambda: create_vit("glyphs", pretrained=True),
    "layer scale of None": lambda: create_vit("vit_small_patch14_dinov2", img_size=56, init_values=None),
}


@pytest.mark.parametrize("name", VALUES)
def test_values(name):
    refused(VALUES[name])


@pytest.mark.parametrize(
    "call",
    [
        lambda: walk(pair(Plan()), IMAGES),
        lambda: walk(Own(), IMAGES),
        lambda: walk_tokens(Eva(**SMALL, use_rot_pos_emb=True), torch.randn(1, 17, 24)),
    ],
)
def test_what_cannot_be_walked(call):
    refused(call, Unwalkable)


REPLACEMENTS = [
    {"q": (2, 3, 17, 9)}, {"k": (2, 4, 17, 8)}, {"v": (1, 3, 17, 8)}, {"map": (2, 3, 16, 17)},
    {"q": (2, 3, 17, 6), "k": (2, 3, 17, 5)}, {"map": (2, 3, 17, 17), "heads": [0]},
    {"q": (2, 1, 17, 6), "k": (2, 1, 17, 6), "heads": [0]}, {"map": (2, 3, 17, 17), "q": (2, 3, 17, 8)},
    {"k": (2, 3, 17, 8), "scale": 0.5}, {"map": (2, 3, 17, 17), "scale": 0.5}, {"kept": ((0,), ())},
    {"map": (2, 1, 17, 17), "heads": [-1]}, {"map": (2, 2, 17, 17), "heads": [1, 1]},
]  # fmt: skip


@pytest.mark.parametrize("instead", REPLACEMENTS, ids=str)
def test_replacements(instead):
    given = {part: torch.rand(x) if part in ("q", "k", "v", "map") else x for part, x in instead.items()}
    refused(lambda: walk(vit(), IMAGES, replace={1: Instead(**given)}))


# --- losses and operations on maps: also shapes that would broadcast silently


def layer(*shape):
    return Seen(*(random_images(*shape, seed=seed) for seed in range(3)), 0.6)


MAP, FOUR = random_maps(1, 2, 3, 3), random_maps(1, 2, 17, 17)
EMPTY = torch.eye(4).expand(1, 2, 4, 4)
ONE, OTHER_SHAPE = layer(2, 3, 4, 4), layer(2, 1, 4, 4)


@pytest.mark.parametrize(
    "call",
    [
        lambda: losses.attention_cross_entropy([ONE], [OTHER_SHAPE]),
        lambda: losses.dense_attention_cross_entropy([ONE], [OTHER_SHAPE]),
        lambda: losses.dense_attention_cross_entropy([ONE], [ONE, ONE]),
        lambda: losses.attention_cross_entropy([ONE], [ONE, ONE]),
        lambda: losses.map_cross_entropy(ONE.map.log(), OTHER_SHAPE.map),
        lambda: losses.projection_mse([ONE], [OTHER_SHAPE], "q"),
        lambda: losses.projection_mse([ONE], [ONE, ONE], "q"),
        lambda: feature_mse([torch.zeros(2, 5, 6)], [torch.zeros(2, 5, 1)]),
        lambda: soft_distillation(torch.zeros(2, 3), torch.zeros(2, 1), 3.0),
        lambda: hard_distillation(torch.zeros(2, 3), torch.zeros(2, 1)),
        lambda: soft_distillation(torch.zeros(2, 3), torch.zeros(2, 3), float("nan")),
        lambda: (
            walk(vit(), IMAGES, replace={0: Instead(map=random_maps(2, 3, 17, 17).float())}).layers[0].scores
        ),
        lambda: maps.average_over([MAP], "example"),
        lambda: maps.average_over([MAP], "examples"),
        lambda: maps.average_over([MAP], "layers"),
        lambda: maps.average_over([MAP, MAP[0]], "heads"),
        maps.aggregate_heads,
        lambda: maps.aggregate_heads(MAP, float("nan")),
        lambda: maps.aggregate_heads(MAP[0]),
        lambda: maps.mean_heads(MAP[..., :2]),
        lambda: maps.resample(FOUR, (4, 5), (2, 2), 1),
        lambda: maps.resample(FOUR, (3, 6), (2, 2), -1),
        lambda: maps.resample_class_attention(FOUR, (4, 4), (2, 2)),
        lambda: maps.keep_tokens(EMPTY.roll(1, -1), [2, 3, 0]),  # row 0 gives nothing to these
        lambda: maps.keep_tokens(MAP, [0, -1]),
        lambda: maps.keep_tokens(MAP, [0, 0]),
    ],
)
def test_tensors(call):
    refused(call)


# --- files

GLYPHS, OTHER = (Architecture("glyphs", {"depth": depth}) for depth in (1, 2))


@pytest.fixture
def good(tmp_path):
    """A file of a ViT and one of a pair."""
    both = AttentionTransfer(OTHER.build(), GLYPHS.build(), Plan(layers={0: 1}))
    return {
        load_vit: save_vit(tmp_path / "vit.safetensors", both.student, GLYPHS),
        load_bundle: save_bundle(tmp_path / "bundle.safetensors", both, GLYPHS, OTHER),
    }


HEADERS = [
    None, {"atlib": "[1]"}, {"atlib": "not json"}, {"atlib": '{"architecture": 3, "needs_teacher": true}'},
    {"atlib": '{"architecture": {"name": "no such vit"}}'},
]  # fmt: skip
BUNDLES = [{"plan": {"how": "teleport"}}, {"plan": {"layers": [9]}}, {"teacher": {"name": "glyphs"}}]


def test_files(good, tmp_path):
    """Each is named, and left as it is."""
    for load, path in good.items():
        content, tensors = path.read_bytes(), load_file(path)
        with safe_open(path, framework="pt") as file:
            header = json.loads(file.metadata()["atlib"])
        garbled = content[:20] + b"\xff\xfe" + content[22:]
        for damaged in (content[:-1], content[:50], b"", b"<html>Not found</html>" * 9, garbled):
            path.write_bytes(damaged)
            with pytest.raises(OSError, match=path.name):
                load(path)
            assert path.read_bytes() == damaged
        changed = BUNDLES if load is load_bundle else [{"architecture": {"name": "cifar"}}]
        for metadata in (*HEADERS, *({"atlib": json.dumps(header | change)} for change in changed)):
            save_file(tensors, path, metadata)
            refused(lambda: load(path), OSError)
        path.write_bytes(content)
        refused(lambda: load(tmp_path / "nowhere"), FileNotFoundError)
    refused(lambda: load_vit(good[load_bundle]), OSError)
    refused(lambda: load_bundle(good[load_vit]), OSError)


def test_architectures_that_are_not_the_models(good, tmp_path):
    """Also one of the same names and shapes, and another function; before anything is written."""
    both, path = load_bundle(good[load_bundle]), tmp_path / "new"
    more_classes = Architecture("glyphs", {"depth": 1, "num_classes": 9})
    refused(lambda: save_vit(path, both.student, more_classes))
    refused(lambda: save_bundle(path, both, more_classes, OTHER))
    refused(lambda: save_bundle(path, both, GLYPHS, more_classes))
    for options in ({"num_heads": 2}, {"act_layer": "relu"}):
        same_shapes = create_vit("glyphs", depth=1, **options)
        refused(lambda vit=same_shapes: save_vit(path, vit, GLYPHS))
    assert not path.exists()


def test_images_of_another_normalisation():
    images = Images(torch.randint(256, (8, 3, 32, 32), dtype=torch.uint8), torch.arange(8) % 4)
    teacher = vit(num_classes=4)
    attach(teacher, Normalisation(0.5, 0.5))
    both = AttentionTransfer(teacher, vit(num_classes=4), Plan(how="distill"), normalisation=IMAGENET)
    refused(lambda: evaluate(both, images))
    refused(lambda: train(both, images, Recipe(steps=1, batch_size=4), cpu=True))
    refused(lambda: both.for_teacher(torch.zeros(2, 1, 32, 32)))
