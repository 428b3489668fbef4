"""Replacing what a layer uses: its own values change nothing, others do exactly what they should, wrong ones
are refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atlib import create_vit, walk
from atlib.attention import Instead, Kept
from tests import longhand
from tests.helpers import Adapted, random_images, randomise, set_fused

EVERY = ("q", "k", "v", "map")


@pytest.fixture(params=[True, False], ids=["fused", "dense"])
def vit(request, small_vit):
    return set_fused(small_vit(qk_norm=False).double(), request.param)


@pytest.fixture
def images():
    return random_images(2, 3, 32, 32, dtype=torch.float64)


def close(left, right):
    return (left - right).abs().max() <= 1e-11


@pytest.mark.parametrize("part", EVERY)
@pytest.mark.parametrize("heads", [None, [0], [2, 0], [0, 1, 2]], ids=str)
def test_own_values_change_nothing(vit, images, part, heads):
    plain = walk(vit, images)
    for layer, seen in enumerate(plain.layers):
        own = getattr(seen, part) if heads is None else getattr(seen, part)[:, heads]
        found = walk(vit, images, replace={layer: Instead(**{part: own}, heads=heads)})
        assert close(found.logits, plain.logits)
        assert close(found.layers[layer].map, seen.map) and close(found.layers[layer].v, seen.v)


def test_own_values_change_nothing_with_query_key_norm(small_vit, images):
    vit = small_vit(qk_norm=True).double()
    plain = walk(vit, images)
    for part in ("q", "k"):
        found = walk(vit, images, replace={1: Instead(**{part: getattr(plain.layers[1], part)})})
        assert close(found.logits, plain.logits)


def test_other_map_equals_the_longhand(vit, images):
    maps = {layer: torch.rand(2, 3, 17, 17, dtype=torch.float64).softmax(-1) for layer in (0, 2)}
    expected = longhand.vit(vit.state_dict(), images, 3, maps=maps)[0]
    found = walk(vit, images, replace={layer: Instead(map=p) for layer, p in maps.items()})
    assert close(found.logits, expected) and not close(found.logits, walk(vit, images).logits)
    assert found.layers[0].q is None and found.layers[0].k is None
    assert torch.equal(found.layers[0].map, maps[0])


def test_other_queries_equal_the_longhand(vit, images):
    queries = {layer: torch.randn(2, 3, 17, 8, dtype=torch.float64) for layer in range(3)}
    expected = longhand.vit(vit.state_dict(), images, 3, queries=queries)[0]
    found = walk(vit, images, replace={layer: Instead(q=q) for layer, q in queries.items()})
    assert close(found.logits, expected)


def test_other_keys_equal_the_map_they_make(vit, images):
    k = torch.randn(2, 3, 17, 8, dtype=torch.float64)
    q = walk(vit, images).layers[1].q
    p = longhand.softmax(torch.einsum("bhid,bhjd->bhij", q, k) / 8**0.5)
    expected = longhand.vit(vit.state_dict(), images, 3, maps={1: p})[0]
    assert close(walk(vit, images, replace={1: Instead(k=k)}).logits, expected)


def test_other_values_change_what_is_mixed_and_not_how(vit, images):
    v = torch.randn(2, 3, 17, 8, dtype=torch.float64)
    plain = walk(vit, images)
    found = walk(vit, images, replace={2: Instead(v=v)})
    assert close(found.layers[2].map, plain.layers[2].map) and torch.equal(found.layers[2].v, v)
    # The last block by hand: p v through proj, then the MLP, then the head.
    w = {name: value for name, value in vit.state_dict().items()}
    routed = (
        torch.einsum("bhij,bhjd->bihd", plain.layers[2].map, v).flatten(2) @ w["blocks.2.attn.proj.weight"].T
        + w["blocks.2.attn.proj.bias"]
    )
    before = walk(vit, images, stop_after=2).tokens
    x = before + routed
    y = longhand.layer_norm(x, w["blocks.2.norm2.weight"], w["blocks.2.norm2.bias"])
    y = longhand.gelu(y @ w["blocks.2.mlp.fc1.weight"].T + w["blocks.2.mlp.fc1.bias"])
    x = x + y @ w["blocks.2.mlp.fc2.weight"].T + w["blocks.2.mlp.fc2.bias"]
    expected = (
        longhand.layer_norm(x, w["norm.weight"], w["norm.bias"])[:, 0] @ w["head.weight"].T + w["head.bias"]
    )
    assert close(found.logits, expected)


@pytest.mark.parametrize("width", [4, 8, 20])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_queries_and_keys_of_another_head_width_bring_their_scale(vit, images, width, scale):
    q, k = torch.randn(2, 2, 3, 17, width, dtype=torch.float64)
    p = longhand.softmax(torch.einsum("bhid,bhjd->bhij", q, k) * (8**-0.5 if scale is None else scale))
    expected = longhand.vit(vit.state_dict(), images, 3, maps={0: p})[0]
    found = walk(vit, images, replace={0: Instead(q=q, k=k, scale=scale)})
    assert close(found.logits, expected) and close(found.layers[0].map, p)


@settings(derandomize=True, deadline=None, max_examples=25)
@given(
    heads=st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True),
    part=st.sampled_from(EVERY),
    layer=st.integers(0, 2),
)
def test_some_heads_are_replaced_and_the_others_kept(heads, part, layer):
    vit = randomise(
        create_vit(
            {"img_size": 16, "patch_size": 8, "embed_dim": 12, "depth": 3, "num_heads": 3, "num_classes": 4}
        )
    ).double()
    images = random_images(2, 3, 16, 16, dtype=torch.float64)
    plain = walk(vit, images).layers[layer]
    other = torch.rand(2, len(heads), 5, 5 if part == "map" else 4, dtype=torch.float64)
    seen = walk(vit, images, replace={layer: Instead(**{part: other}, heads=heads)}).layers[layer]
    for head in range(3):
        of = {name: getattr(plain, name)[:, head] for name in ("q", "k", "v")}
        p = None
        if head in heads:
            if part == "map":
                p = other[:, heads.index(head)]
            else:
                of[part] = other[:, heads.index(head)]
        p = longhand.softmax(torch.einsum("bid,bjd->bij", of["q"], of["k"]) / 2) if p is None else p
        assert close(seen.map[:, head], p) and close(seen.v[:, head], of["v"])


def test_some_heads_with_queries_and_keys_of_another_scale(vit, images):
    q, k = torch.randn(2, 2, 1, 17, 8, dtype=torch.float64)
    plain = walk(vit, images).layers[1].map
    found = walk(vit, images, replace={1: Instead(q=q, k=k, scale=0.7, heads=[2])}).layers[1].map
    expected = longhand.softmax(torch.einsum("bid,bjd->bij", q[:, 0], k[:, 0]) * 0.7)
    assert close(found[:, 2], expected) and close(found[:, :2], plain[:, :2])


@pytest.mark.parametrize(
    "instead, unused",
    [
        ({"map": (17, 17)}, slice(0, 48)),
        ({"q": (17, 8), "k": (17, 8)}, slice(0, 48)),
        ({"q": (17, 8)}, slice(0, 24)),
        ({"k": (17, 8)}, slice(24, 48)),
    ],
    ids=str,
)
def test_what_is_replaced_is_not_computed(small_vit, instead, unused):
    """The rows of the joint projection that are not needed may hold anything."""
    vit, images = small_vit(), random_images(2, 3, 32, 32)
    given = Instead(**{part: torch.rand(2, 3, *shape) for part, shape in instead.items()})
    expected = walk(vit, images, replace={1: given}).logits
    with torch.no_grad():
        vit.blocks[1].attn.qkv.weight[unused] = torch.nan
        vit.blocks[1].attn.qkv.bias[unused] = torch.nan
    assert torch.equal(walk(vit, images, replace={1: given}).logits, expected)


def test_a_projection_that_is_more_than_linear_is_called_and_not_read(small_vit):
    """An adapter keeps the base weight under the name weight; reading it would leave the adapter out."""
    vit, images = small_vit(), random_images(2, 3, 32, 32)
    adapted = Adapted(24, 72)
    adapted.load_state_dict(vit.blocks[1].attn.qkv.state_dict())
    vit.blocks[1].attn.qkv = adapted
    plain = walk(vit, images)
    torch.testing.assert_close(plain.logits, vit(images))
    for part in EVERY:
        found = walk(vit, images, replace={1: Instead(**{part: getattr(plain.layers[1], part)})})
        torch.testing.assert_close(found.logits, plain.logits)


def test_gradients_flow_into_replacements_and_stop_after_keeps_them(small_vit):
    vit, images = small_vit(), random_images(2, 3, 32, 32)
    p = torch.rand(2, 3, 17, 17, requires_grad=True)
    walk(vit, images, replace={0: Instead(map=p)}).logits.sum().backward()
    assert p.grad.abs().min() >= 0 and p.grad.abs().max() > 0
    found = walk(vit, images, replace={0: Instead(map=p)}, stop_after=0)
    assert found.layers[0].given is p


@pytest.mark.parametrize("heads", [None, [1]], ids=str)
@pytest.mark.parametrize("parts", [("q",), ("k",), ("q", "k"), ("map",), ("v",)], ids=str)
def test_replacements_at_the_layer_stopped_at(vit, images, parts, heads):
    """The same map as in a whole walk; of v only the shape is checked, because none is used."""
    count = 3 if heads is None else 1
    given = {
        part: torch.rand(2, count, 17, 17 if part == "map" else 8, dtype=torch.float64) for part in parts
    }
    scale = 0.7 if parts == ("q", "k") else None
    instead = Instead(**given, heads=heads, scale=scale)
    whole, found = (
        walk(vit, images, replace={1: instead}).layers[1],
        walk(vit, images, replace={1: instead}, stop_after=1).layers[1],
    )
    assert close(found.map, whole.map) and found.v is None
    with pytest.raises(ValueError, match=rf"layer 1: v .*\(2, {count}, 16, 8\)"):
        walk(vit, images, replace={1: instead._replace(v=torch.rand(2, count, 16, 8))}, stop_after=1)


def test_attention_dropout_applies_to_a_given_map(small_vit):
    vit, images = small_vit(attn_drop_rate=0.5).train(), random_images(2, 3, 32, 32)
    p = walk(vit, images).layers[0].map.detach()
    once, again = (
        walk(vit, images, replace={layer: Instead(map=p) for layer in range(3)}).logits for _ in range(2)
    )
    assert not torch.equal(once, again)
    vit.eval()
    once, again = (
        walk(vit, images, replace={layer: Instead(map=p) for layer in range(3)}).logits for _ in range(2)
    )
    assert torch.equal(once, again)


def test_a_given_map_has_no_scores(small_vit):
    p = torch.rand(2, 3, 17, 17)
    seen = walk(small_vit(), random_images(2, 3, 32, 32), replace={0: Instead(map=p)}).layers[0]
    with pytest.raises(ValueError, match="map.* q and k"):
        _ = seen.scores


WIDE = {"q": (2, 3, 17, 6), "k": (2, 3, 17, 6)}
WRONG = [
    ({"q": (2, 3, 17, 9)}, r"layer 1: q .*\(2, 3, 17, 9\).*\(2, 3, 17, 8\)"),
    ({"k": (2, 4, 17, 8)}, r"k .*\(2, 4, 17, 8\).*\(2, 3, 17, 8\)"),
    ({"v": (1, 3, 17, 8)}, r"v .*\(1, 3, 17, 8\).*\(2, 3, 17, 8\)"),
    ({"map": (2, 3, 16, 17)}, r"map .*\(2, 3, 16, 17\).*\(2, 3, 17, 17\)"),
    (WIDE | {"k": (2, 3, 17, 5)}, r"k .*\(2, 3, 17, 5\).*\(2, 3, 17, 6\)"),
    (WIDE | {"v": (2, 3, 17, 6)}, r"v .*\(2, 3, 17, 6\).*\(2, 3, 17, 8\)"),
    ({"map": (2, 3, 17, 17), "heads": [0]}, r"map .*\(2, 3, 17, 17\).*\(2, 1, 17, 17\)"),
    ({"q": (2, 1, 17, 6), "k": (2, 1, 17, 6), "heads": [0]}, r"q .*\(2, 1, 17, 6\).*\(2, 1, 17, 8\)"),
    ({"map": (2, 3, 17, 17), "q": (2, 3, 17, 8)}, "layer 1: .*not both"),
    *(({part: (2, 3, 17, 8), "scale": 0.5}, "layer 1: scale=0.5") for part in ("q", "k", "v")),
    ({"map": (2, 3, 17, 17), "scale": 0.5}, "scale=0.5"),
    ({"scale": 0.5}, "scale=0.5"),
    ({"kept": Kept((0,), ())}, r"layer 1: .*queries=\(0,\).*give map="),
    ({"map": (2, 1, 17, 17), "heads": [3]}, r"heads \[3\].* 0 to 2"),
    ({"map": (2, 1, 17, 17), "heads": [-1]}, r"heads \[-1\]"),
    ({"map": (2, 2, 17, 17), "heads": [1, 1]}, r"heads \[1, 1\]"),
    ({"map": (2, 0, 17, 17), "heads": []}, r"heads \[\]"),
]


@pytest.mark.parametrize("instead, named", WRONG, ids=str)
def test_wrong_replacements_are_refused(small_vit, instead, named):
    given = {
        part: shape if part in ("heads", "scale", "kept") else torch.rand(shape)
        for part, shape in instead.items()
    }
    with pytest.raises(ValueError, match=named):
        walk(small_vit(), random_images(2, 3, 32, 32), replace={1: Instead(**given)})
