"""Distance, entropy, prefix share, rollout and class attention: closed forms, and loops written out."""

import math
from dataclasses import replace

import pytest
import torch

from atfamily.measures.cka import class_token, layer_cka
from atfamily.measures.fourier import layer_profiles
from atlib import walk
from atlib.analysis import (
    attention_distance,
    attention_entropy,
    class_attention,
    describe_layers,
    prefix_share,
    rollout,
)
from atlib.data import Images
from tests.helpers import random_maps

CLOSE = dict(rtol=1e-12, atol=1e-12)


def longhand_distance(maps, grid, prefix):
    """Per head, query by query and key by key, with Python's own numbers."""
    B, H, N, _ = maps.shape
    distances = []
    for h in range(H):
        rows = []
        for b in range(B):
            for i in range(prefix, N):
                weights, here = maps[b, h, i, prefix:].tolist(), divmod(i - prefix, grid[1])
                if total := sum(weights):
                    apart = (math.dist(here, divmod(j, grid[1])) for j in range(len(weights)))
                    rows.append(sum(w / total * far for w, far in zip(weights, apart)))
        distances.append(sum(rows) / len(rows))
    return torch.tensor(distances, dtype=torch.float64)


@pytest.mark.parametrize(
    ("grid", "prefix"), [((3, 3), 1), ((2, 4), 0), ((4, 2), 2), ((1, 5), 1), ((1, 1), 1)]
)
def test_distance_against_loops(grid, prefix):
    N = prefix + grid[0] * grid[1]
    for maps in (random_maps(2, 3, N, N), torch.full((1, 2, N, N), 1 / N, dtype=torch.float64)):
        distance = attention_distance(maps, grid, prefix)
        torch.testing.assert_close(distance, longhand_distance(maps, grid, prefix), **CLOSE)


def test_the_share_of_prefix_tokens_is_taken_out():
    maps = random_maps(2, 3, 11, 11)
    leaning = maps.clone()
    leaning[:, 1, 2:] *= 0.3
    leaning[:, 1, 2:, 0] += 0.7  # 70 % to the class token, the rest as it was
    distance, share = attention_distance(maps, (3, 3), 2), prefix_share(maps, 2)
    torch.testing.assert_close(attention_distance(leaning, (3, 3), 2), distance, **CLOSE)
    for h in range(3):
        to_prefix = sum(maps[b, h, i, j].item() for b in range(2) for i in range(2, 11) for j in range(2))
        assert share[h].item() == pytest.approx(to_prefix / 18, rel=1e-12)
    torch.testing.assert_close(prefix_share(leaning, 2)[1], 0.7 + 0.3 * share[1], **CLOSE)
    changed = maps.clone()
    changed[:, :, :2] = random_maps(2, 3, 2, 11, seed=5)  # what prefix tokens look at does not count
    assert torch.equal(attention_distance(changed, (3, 3), 2), distance)
    assert torch.equal(prefix_share(changed, 2), share)


def test_rows_that_give_the_patches_nothing_have_no_distance():
    maps = random_maps(2, 3, 10, 10)
    maps[:, 1, 4] = torch.eye(10, dtype=torch.float64)[0]
    distance = attention_distance(maps, (3, 3), 1)
    torch.testing.assert_close(distance, longhand_distance(maps, (3, 3), 1), **CLOSE)
    maps[:, 1] = torch.eye(10, dtype=torch.float64)[0]
    assert attention_distance(maps, (3, 3), 1).isnan().tolist() == [False, True, False]
    assert prefix_share(maps, 1)[1] == 1


def test_entropy_of_known_maps():
    N = 8
    two_keys = torch.zeros(N, N).index_fill(1, torch.tensor([0, 5]), 0.5)
    maps = torch.stack([torch.full((N, N), 1 / N), two_keys])[None].expand(3, -1, -1, -1)
    torch.testing.assert_close(attention_entropy(maps), torch.tensor([math.log(N), math.log(2)]))
    random = random_maps(2, 2, 5, 5)
    expected = [-sum(p * math.log(p) for p in random[:, h].flatten().tolist()) / 10 for h in range(2)]
    assert attention_entropy(random).tolist() == pytest.approx(expected, rel=1e-12)


def test_rollout_multiplies_layers_last_first():
    maps = [random_maps(2, 3, 5, 5, seed=seed) for seed in range(3)]
    for b in range(2):
        expected = torch.eye(5, dtype=torch.float64)
        for map in maps:
            expected = (0.7 * torch.eye(5, dtype=torch.float64) + 0.3 * sum(map[b]) / 3) @ expected
        torch.testing.assert_close(rollout(maps, residual=0.7)[b], expected, **CLOSE)
    torch.testing.assert_close(rollout(maps).sum(-1), torch.ones(2, 5, dtype=torch.float64), **CLOSE)
    # one layer copies token 3 to 0, the next token 0 to 4: what token 4 holds then comes from token 3
    first, second = (torch.eye(5)[list(order)][None, None] for order in ([3, 1, 2, 3, 4], [0, 1, 2, 3, 0]))
    assert rollout([first, second], residual=0.0)[0, 4].tolist() == [0, 0, 0, 1, 0]


def test_class_attention_is_laid_out_row_by_row():
    maps = random_maps(2, 3, 8, 8)
    pictures = class_attention(maps, (2, 3), 2)
    assert pictures.shape == (2, 3, 2, 3)
    for row in range(2):
        for column in range(3):
            assert torch.equal(pictures[:, :, row, column], maps[:, :, 0, 2 + 3 * row + column])


@pytest.fixture
def images(glyphs64):
    """Seven of 16 x 24 pixels: a grid that is not square."""
    seven = glyphs64.select(range(7))
    return replace(seven, pixels=seven.pixels[:, :, :16, :24])


@pytest.fixture
def vit(small_vit):
    return lambda seed: small_vit(seed, img_size=(16, 24), reg_tokens=1)


@pytest.mark.parametrize("batch_size", [3, 7, 100])
def test_layers_are_described_over_any_batches(vit, images, batch_size):
    model = vit(0).train()
    described = describe_layers(model, images, batch_size)
    assert model.training and len(described) == 3
    with torch.no_grad():
        seen = walk(model.eval(), images.take(range(7))[0]).layers
    for one, layer in zip(described, seen):
        map = layer.map.double()
        torch.testing.assert_close(one.distance, longhand_distance(map, (2, 3), 2), rtol=1e-5, atol=0)
        torch.testing.assert_close(one.entropy, attention_entropy(map), rtol=1e-5, atol=0)
        torch.testing.assert_close(one.prefix_share, prefix_share(map, 2), rtol=1e-5, atol=0)


class Gaps(Images):
    """Of 7 images those at 2 and 6 come with no batch, as photographs do that cannot be decoded."""

    def loader(self, batch_size):
        for batch in torch.arange(7).split(batch_size):
            if kept := [index for index in batch.tolist() if index not in (2, 6)]:
                yield self.take(kept)


@pytest.mark.parametrize("batch_size", [3, 100])
def test_images_that_are_left_out_do_not_count(small_vit, glyphs64, batch_size):
    vit, other = small_vit(0), small_vit(1)
    whole, gaps = glyphs64.select([0, 1, 3, 4, 5]), Gaps(glyphs64.pixels[:7], glyphs64.targets[:7])
    for found in (
        lambda images: [torch.stack(one) for one in describe_layers(vit, images, batch_size)],
        lambda images: [one.log_amplitude for one in layer_profiles(vit, images, batch_size)],
        lambda images: layer_cka(vit, other, images, class_token, batch_size=batch_size),
    ):
        torch.testing.assert_close(found(gaps), found(whole), rtol=1e-4, atol=1e-5)
