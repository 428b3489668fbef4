"""The rows in a page are those of the walk, within the quantiser's bound, for every kind of ViT."""

import base64

import numpy as np
import pytest
import timm
import torch

from atlib import AttentionTransfer, Normalisation, Plan, Unwalkable, look, walk
from atrun.looking.preparation import preparation_of, prepare
from atrun.looking.rows import quantise
from tests.looking.reading import AS_IT_IS, bound, content_of, picture, rows_of


def shares(vit, preparation=AS_IT_IS):
    """Every layer's map of the picture, float64 (layers, H, N, N)."""
    pixels = prepare(picture(*preparation.size), preparation).pixels.to(next(vit.parameters()).dtype)
    with torch.no_grad():
        return [layer.map[0].double().numpy() for layer in walk(vit.eval(), pixels).layers]


def longhand_rollout(maps):
    """Abnar and Zuidema's rollout up to each layer, with plain loops over layers and heads."""
    N = maps[0].shape[-1]
    rolled, out = np.eye(N), []
    for map in maps:
        mixed = sum(map[head] for head in range(len(map))) / len(map)
        rolled = (0.5 * np.eye(N) + 0.5 * mixed) @ rolled
        out.append(rolled)
    return out


def test_the_quantisers_error_is_within_its_bound():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(200, 300, generator=generator, dtype=torch.float64)
    sharp = torch.logspace(-3, 1.5, 200, dtype=torch.float64)[:, None]
    rows = torch.cat([(sharp * logits).softmax(-1), torch.full((1, 300), 1 / 300), torch.eye(300)[:1]])
    levels, largest = quantise(rows)
    exact = rows.numpy()
    back = largest.double().numpy()[:, None] * (levels.numpy() / 255.0) ** 2
    assert levels.dtype == torch.uint8 and largest.dtype == torch.float32
    assert (np.abs(back - exact) <= bound(exact)).all()
    assert (np.abs(back - exact) <= exact.max(-1, keepdims=True) * (1 / 255 + 1e-7)).all()
    # it is no looser than it has to be: somewhere the error comes close to it
    assert (np.abs(back - exact) / bound(exact)).max() > 0.95
    np.testing.assert_allclose(back.max(-1), exact.max(-1), rtol=1e-7)


VITS = {  # the names of prefix tokens: arguments
    ("register 0", "register 1"): {
        "class_token": False,
        "global_pool": "avg",
        "reg_tokens": 2,
        "no_embed_class": True,
    },
    ("class token", "distillation token"): {"distilled": True},
    ("class token",): {"img_size": (16, 40)},
}


@pytest.mark.parametrize("prefix", VITS)
def test_rows_are_those_of_the_walk(small_vit, prefix):
    changes = VITS[prefix]
    vit = small_vit(**changes)
    preparation = AS_IT_IS._replace(size=tuple(vit.patch_embed.img_size))
    shown = look({"it": vit}, picture(*preparation.size), preparation=preparation)
    (model,) = content_of(shown.html())["models"]
    assert model["grid"] == list(vit.patch_embed.grid_size)
    assert model["prefix"] == list(prefix)
    maps, found = shares(vit, preparation), rows_of(model)
    rolled = longhand_rollout(maps)
    N = maps[0].shape[-1]
    assert len(found) == len(maps) * (maps[0].shape[0] + 3) * N, "all heads, what is beside, all tokens"
    with torch.no_grad():
        stream = walk(vit, prepare(picture(*preparation.size), preparation).pixels).stream
    for (layer, head, query), row in found.items():
        features = stream[layer][0].double().numpy()
        features /= np.linalg.norm(features, axis=1, keepdims=True)
        beside = {"mean": maps[layer].mean(0), "rollout": rolled[layer]}
        expected = beside.get(head, (features @ features.T).clip(0) if head == "similarity" else None)
        expected = (maps[layer][head] if expected is None else expected)[query]
        assert (np.abs(row - expected) <= bound(expected) + 1e-6).all(), (layer, head, query)


def assert_heads(found, maps, layers):
    """That the stored rows of these layers' heads are those of maps, of rows that sum to 1."""
    for (layer, head, query), row in found.items():
        if isinstance(head, int) and layer in layers:
            expected = maps[layer][head][query] / maps[layer][head][query].sum()
            assert (np.abs(row - expected) <= bound(expected) + 1e-6).all()


def rows_of_one(model, preparation=AS_IT_IS):
    return rows_of(content_of(look({"it": model}, picture(), preparation=preparation).html())["models"][0])


def test_half_precision_and_the_mode_a_model_was_in(small_vit):
    vit = small_vit(drop_path_rate=0.5).bfloat16().train()
    found = rows_of_one(vit)
    assert vit.training
    assert_heads(found, shares(vit), (0, 1, 2))


def test_a_copying_pair_shows_its_teachers_maps(small_vit):
    teacher, student = small_vit(1), small_vit(2)
    found = rows_of_one(AttentionTransfer(teacher, student, Plan(how="copy", layers=[0, 2])))
    assert_heads(found, shares(teacher), (0, 2))
    alone = shares(student)[1][0][0]
    assert np.abs(found[1, 0, 0] - alone).max() > 0.01, "a copied layer 0 changes what layer 1 sees"


def test_a_pair_is_given_images_as_it_was_told(small_vit):
    told = Normalisation((0.1,) * 3, (0.9,) * 3)
    pair = AttentionTransfer(small_vit(1), small_vit(2), Plan(how="copy"), normalisation=told)
    asked = preparation_of(pair.student, mean=told.mean, std=told.std)
    by_itself, as_asked = (rows_of_one(pair, preparation) for preparation in (None, asked))
    assert all(np.array_equal(by_itself[key], row) for key, row in as_asked.items())


def test_fewer_layers_and_heads_and_mean_and_rollout_stay_whole(small_vit):
    vit = small_vit()
    shown = look({"it": vit}, picture(), preparation=AS_IT_IS, layers=[2, 0], heads=[1])
    (model,) = content_of(shown.html())["models"]
    assert model["layers"] == [{"layer": 0, "heads": [1]}, {"layer": 2, "heads": [1]}]
    maps, found = shares(vit), rows_of(model)
    for layer in (0, 2):
        for head, expected in (("mean", maps[layer].mean(0)), ("rollout", longhand_rollout(maps)[layer])):
            assert (np.abs(found[layer, head, 3] - expected[3]) <= bound(expected[3]) + 1e-6).all()
    said = " ".join(shown.notes)
    assert "of 3 layers all but 0, 2" in said and "of 3 heads all but 1" in said


def test_rows_that_do_not_fit_are_those_of_patches_and_the_page_says_so(small_vit):
    vit = small_vit(img_size=72, patch_size=8, reg_tokens=2)
    preparation = AS_IT_IS._replace(size=(72, 72))
    room = 0.1
    shown = look({"it": vit}, picture(72, 72), preparation=preparation, megabytes=room)
    (model,) = content_of(shown.html())["models"]
    assert model["down"] == model["across"] == [1, 3, 5, 7], "every second of nine"
    coarse = model["coarse"]
    assert sum(len(one[name]) for one in (model, coarse) for name in ("levels", "largest")) <= room * 1e6
    assert "4 x 4 of 9 x 9 patches" in " ".join(shown.notes)
    maps, found = shares(vit, preparation), rows_of(model)
    assert {query for _, _, query in found} >= {0, 1, 2}, "prefix tokens are all there"
    row = found[1, 2, 3 + 3 * 9 + 5]
    expected = maps[1][2][3 + 3 * 9 + 5]
    assert (np.abs(row - expected) <= bound(expected) + 1e-6).all()
    # the other patches are there too, over blocks of three by three
    assert coarse["side"] == 3
    codes = np.frombuffer(base64.b64decode(coarse["levels"]), np.uint8).reshape(3, 6, 81, 3 + 9) / 255.0
    largest = np.frombuffer(base64.b64decode(coarse["largest"]), "<f4").reshape(3, 6, 81, 1)
    for layer, patch in ((1, 0), (2, 44)):
        row = maps[layer][2][3 + patch]
        means = [row[3:].reshape(9, 9)[i : i + 3, j : j + 3].mean() for i in (0, 3, 6) for j in (0, 3, 6)]
        expected = np.array([*row[:3], *means])
        stored = largest[layer, 2, patch] * codes[layer, 2, patch] ** 2
        assert (np.abs(stored - expected) <= bound(expected) + 1e-6).all()
    whole = look({"it": vit}, picture(72, 72), preparation=preparation, megabytes=1)
    assert "Left out" not in " ".join(whole.notes) and "coarse" not in content_of(whole.html())["models"][0]


@pytest.mark.parametrize("options", [{"layers": [3]}, {"heads": [-1]}, {"megabytes": 0.0001}])
def test_what_is_refused(small_vit, options):
    with pytest.raises(ValueError):
        look(small_vit(), picture(), preparation=AS_IT_IS, **options)


def test_what_cannot_be_walked_or_is_not_finite_is_refused(small_vit):
    with pytest.raises(Unwalkable):
        look(torch.nn.Linear(2, 2), picture())
    vit = small_vit()
    with torch.no_grad():
        vit.blocks[1].attn.qkv.weight[0, 0] = float("nan")
    with pytest.raises(ValueError):
        look(vit, picture(), preparation=AS_IT_IS)


def test_naflex_has_a_page():
    model = timm.create_model("naflexvit_base_patch16_gap", depth=1, num_classes=0).eval()
    (rows, prepared), *_ = look(model, picture(90, 140)).models.values()
    down, across = rows.tokens.grid
    assert prepared.pixels.shape[-2:] == (16 * down, 16 * across)
    assert rows.levels.shape[1] == down * across + len(rows.tokens.prefix)
