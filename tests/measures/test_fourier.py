"""The Fourier profile: signals whose transform is known, a sum written out, and any batches."""

import cmath
import math

import pytest
import torch

from atfamily.measures.fourier import fourier_profile, layer_profiles
from atlib import AttentionTransfer, Plan, walk
from atlib.attention import Instead
from tests.helpers import random_images


def tokens_of(maps, prefix=0):
    """Feature maps (B, D, rows, columns) as tokens, with prefix tokens that must not matter."""
    patches = maps.flatten(2).mT
    return torch.cat([torch.full((len(maps), prefix, maps.shape[1]), 1e3, dtype=maps.dtype), patches], 1)


@pytest.mark.parametrize("n", [4, 5])
def test_against_the_sum_written_out(n):
    maps = random_images(2, 3, n, n, dtype=torch.float64)
    profile = fourier_profile(tokens_of(maps, prefix=2), (n, n), 2)
    logs = []
    for k in range(n // 2 + 1):
        waves = [[cmath.exp(-2j * math.pi * k * (x + y) / n) for x in range(n)] for y in range(n)]
        at = range(n)
        sums = [sum(map[y][x] * waves[y][x] for y in at for x in at) for map in maps.flatten(0, 1).tolist()]
        logs.append(sum(math.log(abs(one) + 1e-6) for one in sums) / 6)
    expected = [log - logs[0] for log in logs]
    assert profile.log_amplitude.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert profile.frequency.tolist() == pytest.approx([2 * k / n for k in range(n // 2 + 1)])
    assert profile.frequency[-1] == (1 if n == 4 else 0.8)


@pytest.mark.parametrize("batch_size", [3, 100])
def test_every_layer_over_any_batches(small_vit, glyphs64, batch_size):
    images, teacher, student = glyphs64.select(range(7)), small_vit(1), small_vit(2)
    with torch.no_grad():
        batch = images.take(range(7))[0]
        walked = walk(teacher, batch)
        copied = {i: Instead(map=layer.map) for i, layer in enumerate(walked.layers)}
        streams = [walked.stream, walk(student, batch, replace=copied).stream]
    for model, stream in zip((teacher, AttentionTransfer(teacher, student, Plan(how="copy"))), streams):
        profiles = layer_profiles(model, images, batch_size)
        for one, tokens in zip(profiles, stream, strict=True):
            by_image = [fourier_profile(tokens[[i]], (4, 4), 1).log_amplitude for i in range(7)]
            torch.testing.assert_close(one.log_amplitude, sum(by_image) / 7, rtol=1e-4, atol=1e-4)
            assert one.frequency.tolist() == pytest.approx([0, 1 / 2, 1])
