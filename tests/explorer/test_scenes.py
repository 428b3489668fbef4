"""Scenes in JavaScript: drawn pixel for pixel as the generator draws them, and new ones by its rules."""

from collections import Counter

import numpy as np
import pytest

from atbook.worlds import glyphs
from atbook.worlds.glyphs import TASKS, TWINS, World, generate
from tests.explorer.conftest import ask, received

SCENES = 20
SHIFTED = [
    {}, {"background": 0.35}, {"contrast": 0.3}, {"saturation": 0.0},
    {"saturation": 0.4, "hue_shift": -0.3}, {"hue_shift": 1 / 12}, {"clutter": 0}, {"clutter": 6},
    {"cue": 0.4}, {"jitter": 0}, {"jitter": 3}, {"scale": 0.5}, {"scale": 0.75}, {"scale": 1.34},
    {"rendering": "inverted"}, {"rendering": "dotted"}, {"texture": 1.0},
    {"texture": 0.35, "rendering": "inverted"},
    {"background": 0.22, "contrast": 0.7, "clutter": 9, "rendering": "dotted", "scale": 1.2, "jitter": 2},
]  # fmt: skip


def exported(drawn, index, task):
    """The scene of the explorer that the generator's i-th choices are."""
    cell, key = int(drawn.cell[index]), int(drawn.key[index])
    hue = drawn.hue[index].copy()
    if task == "match":
        named = hue[cell]
        hue = (named + drawn.apart[index]) % len(glyphs.HUES)
        hue[[cell, key]] = named
    cells = [
        {
            "shape": int(drawn.shape[index, i]),
            "hue": int(hue[i]),
            "jitter": float(drawn.hue_jitter[index, i]),
            "shade": float(drawn.shade[index, i]),
            "offset": drawn.offset[index, i].tolist(),
            "crowd": float(drawn.crowd[index, i]),
            "stripes": int(drawn.stripes[index, i]),
        }
        for i in range(16)
    ]
    places = {"cell": cell, "key": key if task == "match" else -1, "decoy": int(drawn.decoy[index])}
    return {"task": task, **places, "noise": 0, "cells": cells}


@pytest.fixture(scope="module")
def drawn():
    """The choices behind those of `generate`."""
    return glyphs._draw(np.random.default_rng([0, glyphs.SPLITS.index("test"), 0]))


RENDER = "([scenes, world]) => textOf(scenes.map(s => Explorer.render(s, {...Explorer.WORLD, ...world})))"


@pytest.mark.parametrize(
    "task, shift",
    [
        *((task, shift) for task in TASKS for shift in SHIFTED),
        *(("find", {"decoy": level}) for level in (0.3, 0.9)),
    ],
    ids=str,
)
def test_pixels_are_the_generators(tab, drawn, task, shift):
    expected = generate("test", SCENES, 0, World(task, noise=0, **shift))
    scenes = [exported(drawn, index, task) for index in range(SCENES)]
    pixels = received(ask(tab, RENDER, [scenes, {"noise": 0} | shift]), np.uint8)
    np.testing.assert_array_equal(pixels.reshape(expected.images.shape), expected.images)
    labels = ask(tab, "scenes => scenes.map(Explorer.label)", scenes)
    assert labels == expected.shape.tolist()


@pytest.mark.parametrize("blur", [0.3, 0.8])
def test_blur_is_the_generators(tab, drawn, blur):
    """To one level in 10,000 bytes: the order in which a dot product is summed is the processor's matter."""
    expected = generate("test", SCENES, 0, World("match", noise=0, blur=blur)).images
    scenes = [exported(drawn, index, "match") for index in range(SCENES)]
    pixels = received(ask(tab, RENDER, [scenes, {"noise": 0, "blur": blur}]), np.uint8)
    apart = np.abs(pixels.reshape(expected.shape).astype(int) - expected)
    assert apart.max() <= 1 and apart.mean() < 1e-4


def new(tab, task, size):
    return ask(tab, "([task, n]) => Array.from({length: n}, (_, i) => Explorer.draw(task, i))", [task, size])


def even(values, kinds):
    """Whether all kinds are about equally frequent: a chi-square far inside what chance does."""
    counts = Counter(values)
    expected = len(values) / kinds
    assert set(counts) <= set(range(kinds))
    return sum((counts[kind] - expected) ** 2 / expected for kind in range(kinds)) < 3 * kinds + 10


@pytest.mark.parametrize("task", TASKS)
def test_new_scenes_follow_the_generators_rules(tab, task):
    scenes = new(tab, task, 500)
    assert scenes == new(tab, task, 500) and scenes[0] != scenes[1]
    assert even([scene["cell"] for scene in scenes], 16)
    assert even([(scene["decoy"] - scene["cell"]) % 16 - 1 for scene in scenes], 15)
    cells = [cell for scene in scenes for cell in scene["cells"]]
    assert even([cell["shape"] for cell in cells], 8) and even([cell["hue"] for cell in cells], 6)
    assert even([cell["stripes"] for cell in cells], 4)
    for name, low, high in (("jitter", -0.04, 0.04), ("shade", 0.6, 1), ("crowd", 0, 1)):
        values = np.array([cell[name] for cell in cells])
        assert low <= values.min() and values.max() <= high
        assert abs(values.mean() - (low + high) / 2) < 0.02 * (high - low)
    assert abs(np.mean([cell["offset"] for cell in cells]) - 0.5) < 0.02
    for scene in scenes:
        hues = [cell["hue"] for cell in scene["cells"]]
        alike = {i for i, hue in enumerate(hues) if hue == hues[scene["cell"]]}
        if task == "match":
            assert scene["key"] != scene["cell"] and alike == {scene["cell"], scene["key"]}
        else:
            assert scene["key"] == -1


TWIN = "([scenes, what]) => scenes.map((scene, i) => Explorer.twin(scene, what, 5000 + i))"


@pytest.mark.parametrize("what", TWINS)
@pytest.mark.parametrize("task", TASKS)
def test_twins_share_what_they_should(tab, task, what):
    scenes = new(tab, task, 300)
    twins = ask(tab, TWIN, [scenes, what])
    labels = ask(tab, "scenes => scenes.map(Explorer.label)", scenes)
    theirs = ask(tab, "scenes => scenes.map(Explorer.label)", twins)
    same_places = [(a["cell"], a["key"]) == (b["cell"], b["key"]) for a, b in zip(scenes, twins)]
    same_noise = [a["noise"] == b["noise"] for a, b in zip(scenes, twins)]
    own = [scene["cells"][scene["cell"]] for scene in scenes]
    if what == "routing":
        assert all(same_places) and not any(same_noise)
        for scene, twin in zip(scenes, twins):
            assert [c | {"shape": 0} for c in scene["cells"]] == [c | {"shape": 0} for c in twin["cells"]]
        assert 0.05 < np.mean(np.equal(labels, theirs)) < 0.25  # chance: an eighth
    elif what == "unrelated":
        assert not any(same_noise) and 0.05 < np.mean(np.equal(labels, theirs)) < 0.25
        assert np.mean([a["cell"] == b["cell"] for a, b in zip(scenes, twins)]) < 0.2
    elif what == "message":
        assert labels == theirs and not any(same_noise)
        assert np.mean([a["cell"] == b["cell"] for a, b in zip(scenes, twins)]) < 0.2
    else:
        assert all(same_places) and all(same_noise)
        assert own == [twin["cells"][twin["cell"]] for twin in twins]
        others = [
            (a["cells"][i]["shape"], b["cells"][i]["shape"])
            for a, b in zip(scenes, twins)
            for i in range(16)
            if i != a["cell"]
        ]
        assert 0.1 < np.mean([a == b for a, b in others]) < 0.15
    if task == "match":
        for twin in twins:
            hues = [cell["hue"] for cell in twin["cells"]]
            alike = {i for i, hue in enumerate(hues) if hue == hues[twin["cell"]]}
            assert alike == {twin["cell"], twin["key"]}
        apart = [
            (cell["hue"] - twin["cells"][twin["cell"]]["hue"]) % 6 - 1
            for twin in twins
            for i, cell in enumerate(twin["cells"])
            if i not in (twin["cell"], twin["key"])
        ]
        assert even(apart, 5)
