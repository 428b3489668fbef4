"""Distance, entropy, prefix share, rollout and class attention: closed forms, loops written out, bad input."""

import math

import pytest
import torch

from atlib import AttentionTransfer, Plan, create_vit, walk
from atlib.analysis.attention_maps import (
    attention_distance,
    attention_entropy,
    class_attention,
    describe_layers,
    prefix_share,
    rollout,
)
from atlib.data import Images
from tests.helpers import randomise

CLOSE = dict(rtol=1e-12, atol=1e-12)


def random_maps(*shape, seed=0, dtype=torch.float64):
    return (
        (2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))
        .softmax(-1)
        .to(dtype)
    )


def longhand_distance(maps, grid, prefix):
    """Per head, query by query and key by key, with Python's own numbers."""
    B, H, N, _ = maps.shape
    found = []
    for h in range(H):
        rows = []
        for b in range(B):
            for i in range(prefix, N):
                weights = maps[b, h, i, prefix:].tolist()
                total = sum(weights)
                if total > 0:
                    here = divmod(i - prefix, grid[1])
                    rows.append(
                        sum(w / total * math.dist(here, divmod(j, grid[1])) for j, w in enumerate(weights))
                    )
        found.append(sum(rows) / len(rows))
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.parametrize(
    ("grid", "prefix"), [((3, 3), 1), ((2, 4), 0), ((4, 2), 2), ((1, 5), 1), ((1, 1), 1)]
)
def test_distance_against_loops(grid, prefix):
    N = prefix + grid[0] * grid[1]
    maps = random_maps(2, 3, N, N)
    torch.testing.assert_close(
        attention_distance(maps, grid, prefix), longhand_distance(maps, grid, prefix), **CLOSE
    )
    uniform = torch.full((1, 2, N, N), 1 / N, dtype=torch.float64)
    torch.testing.assert_close(
        attention_distance(uniform, grid, prefix), longhand_distance(uniform, grid, prefix), **CLOSE
    )


def test_distance_of_uniform_attention_on_a_line_of_patches():
    # the mean of |i - j| over all i, j from 0 to n - 1 is (n² - 1) / 3n
    uniform = torch.full((1, 1, 7, 7), 1 / 7, dtype=torch.float64)
    assert attention_distance(uniform, (1, 7), 0).item() == pytest.approx(48 / 21, rel=1e-12)
    assert attention_distance(uniform, (7, 1), 0).item() == pytest.approx(48 / 21, rel=1e-12)


def test_an_identity_map_looks_nowhere_else():
    identity = torch.eye(10).expand(2, 3, 10, 10)
    assert attention_distance(identity, (3, 3), 1).tolist() == [0] * 3
    assert attention_entropy(identity).tolist() == [0] * 3
    assert prefix_share(identity, 1).tolist() == [0] * 3


@pytest.mark.parametrize("k", [1, 2])
def test_a_head_that_looks_k_columns_to_the_right(k):
    rows, columns = 3, 5
    map = torch.zeros(1, 2, 15, 15)
    for place in range(15):
        row, column = divmod(place, columns)
        map[0, 0, place, row * columns + min(column + k, columns - 1)] = 1  # stops at the edge
        map[0, 1, place, ((row + k) % rows) * columns + column] = 1  # down, around the edge
    stopped = sum(min(k, columns - 1 - column) for column in range(columns)) / columns
    around = sum(abs((row + k) % rows - row) for row in range(rows)) / rows
    torch.testing.assert_close(attention_distance(map, (rows, columns), 0), torch.tensor([stopped, around]))


def test_the_share_of_prefix_tokens_is_taken_out():
    maps = random_maps(2, 3, 11, 11)
    leaning = maps.clone()
    leaning[:, 1, 2:] *= 0.3
    leaning[:, 1, 2:, 0] += 0.7  # 70 % to the class token, the rest as it was
    torch.testing.assert_close(
        attention_distance(leaning, (3, 3), 2), attention_distance(maps, (3, 3), 2), **CLOSE
    )
    expected = [
        sum(maps[b, h, i, j].item() for b in range(2) for i in range(2, 11) for j in range(2)) / 18
        for h in range(3)
    ]
    torch.testing.assert_close(prefix_share(maps, 2), torch.tensor(expected, dtype=torch.float64), **CLOSE)
    torch.testing.assert_close(prefix_share(leaning, 2)[1], 0.7 + 0.3 * prefix_share(maps, 2)[1], **CLOSE)
    changed = maps.clone()
    changed[:, :, :2] = random_maps(2, 3, 2, 11, seed=5)  # what prefix tokens look at does not count
    assert torch.equal(attention_distance(changed, (3, 3), 2), attention_distance(maps, (3, 3), 2))
    assert torch.equal(prefix_share(changed, 2), prefix_share(maps, 2))


def test_rows_that_give_the_patches_nothing_have_no_distance():
    maps = random_maps(2, 3, 10, 10)
    maps[:, 1, 4] = torch.eye(10, dtype=torch.float64)[0]
    torch.testing.assert_close(
        attention_distance(maps, (3, 3), 1), longhand_distance(maps, (3, 3), 1), **CLOSE
    )
    maps[:, 1] = torch.eye(10, dtype=torch.float64)[0]
    with pytest.raises(ValueError, match="head 1: every patch gives all its attention to prefix tokens"):
        attention_distance(maps, (3, 3), 1)
    assert prefix_share(maps, 1)[1] == 1


def test_entropy_of_known_maps():
    N = 8
    two_keys = torch.zeros(N, N).index_fill(1, torch.tensor([0, 5]), 0.5)
    maps = torch.stack([torch.full((N, N), 1 / N), two_keys])[None].expand(3, -1, -1, -1)
    torch.testing.assert_close(attention_entropy(maps), torch.tensor([math.log(N), math.log(2)]))
    random = random_maps(2, 2, 5, 5)
    expected = [-sum(p * math.log(p) for p in random[:, h].flatten().tolist()) / 10 for h in range(2)]
    torch.testing.assert_close(
        attention_entropy(random), torch.tensor(expected, dtype=torch.float64), **CLOSE
    )


def test_half_precision_is_summed_in_single():
    maps = random_maps(2, 2, 197, 197, dtype=torch.float16)
    exact = maps.double()
    exact = exact / exact.sum(-1, keepdim=True)
    torch.testing.assert_close(attention_entropy(maps).double(), attention_entropy(exact), rtol=2e-3, atol=0)
    torch.testing.assert_close(
        attention_distance(maps, (14, 14), 1).double(),
        attention_distance(exact, (14, 14), 1),
        rtol=1e-5,
        atol=0,
    )


def test_rollout_multiplies_layers_last_first():
    maps = [random_maps(2, 3, 5, 5, seed=seed) for seed in range(3)]
    for b in range(2):
        expected = torch.eye(5, dtype=torch.float64)
        for map in maps:
            mixed = [
                [0.7 * (i == j) + 0.3 * sum(map[b, h, i, j].item() for h in range(3)) / 3 for j in range(5)]
                for i in range(5)
            ]
            expected = torch.tensor(mixed, dtype=torch.float64) @ expected
        torch.testing.assert_close(rollout(maps, residual=0.7)[b], expected, **CLOSE)
    torch.testing.assert_close(rollout(maps).sum(-1), torch.ones(2, 5, dtype=torch.float64), **CLOSE)
    torch.testing.assert_close(
        rollout(maps, residual=1.0), torch.eye(5, dtype=torch.float64).expand(2, 5, 5), **CLOSE
    )
    # one layer copies token 3 to token 0, the next token 0 to token 4: what token 4 holds then comes from
    # token 3
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
def images():
    pixels = torch.randint(
        0, 256, (7, 3, 16, 24), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    return Images(pixels, torch.zeros(7, dtype=torch.long))


def vit(seed):
    made = create_vit(
        {
            "img_size": (16, 24),
            "patch_size": 8,
            "embed_dim": 12,
            "depth": 2,
            "num_heads": 3,
            "num_classes": 5,
            "reg_tokens": 1,
        }
    )
    return randomise(made, seed)


@pytest.mark.parametrize("batch_size", [3, 7, 100])
def test_layers_are_described_over_any_batches(images, batch_size):
    model = vit(0).train()
    described = describe_layers(model, images, batch_size)
    assert model.training and len(described) == 2
    with torch.no_grad():
        seen = walk(model.eval(), images.take(range(7))[0]).layers
    for one, layer in zip(described, seen):
        map = layer.map.double()
        torch.testing.assert_close(one.distance, longhand_distance(map, (2, 3), 2), rtol=1e-5, atol=0)
        torch.testing.assert_close(one.entropy, attention_entropy(map), rtol=1e-5, atol=0)
        torch.testing.assert_close(one.prefix_share, prefix_share(map, 2), rtol=1e-5, atol=0)


def test_a_copying_student_is_described_with_the_maps_it_uses(images):
    teacher, student = vit(1), vit(2)
    expected, own = describe_layers(teacher, images), describe_layers(student, images)
    copied = describe_layers(AttentionTransfer(teacher, student, Plan(how="copy", layers=[0])), images)
    torch.testing.assert_close(copied[0], expected[0], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(copied[0].entropy, own[0].entropy, rtol=1e-2)
    assert not torch.allclose(copied[1].entropy, expected[1].entropy, rtol=1e-2)


def test_bad_input_is_refused_by_name(images):
    maps = random_maps(1, 2, 10, 10)
    for grid, prefix in (((3, 3), 2), ((2, 5), 1), ((-3, -3), 1), ((9,), 1)):
        with pytest.raises(ValueError, match=r"grid=.* does not fit"):
            attention_distance(maps, grid, prefix)
    with pytest.raises(ValueError, match="prefix_tokens=10"):
        prefix_share(maps, 10)
    with pytest.raises(ValueError, match="no class attention"):
        class_attention(random_maps(1, 2, 9, 9), (3, 3), 0)
    with pytest.raises(ValueError, match="no maps"):
        rollout([])
    with pytest.raises(ValueError, match=r"residual=1\.5"):
        rollout([maps], residual=1.5)
    with pytest.raises(ValueError, match="layer 1"):
        rollout([maps, random_maps(1, 2, 9, 9)])
    bad = maps.clone()
    bad[0, 1, 3] *= 2
    for read in (
        lambda m: attention_distance(m, (3, 3), 1),
        attention_entropy,
        lambda m: prefix_share(m, 1),
        lambda m: class_attention(m, (3, 3), 1),
    ):
        with pytest.raises(ValueError, match="head 1"):
            read(bad)
    with pytest.raises(ValueError, match="layer 1: head 1"):
        rollout([maps, bad])
    broken = vit(0)
    with torch.no_grad():
        broken.blocks[1].attn.qkv.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="layer 1: head 0"):
        describe_layers(broken, images)
