"""Worlds that cannot be: each is refused."""

import math

import pytest

from atbook.worlds.glyphs import World, generate
from atbook.worlds.phrases import generate_phrases
from atbook.worlds.scenes import MOST, SceneWorld, generate_scenes
from atbook.worlds.shifts import shifted, shifted_images

WORLDS = [
    {"noise": -0.1}, {"noise": 2.1}, {"noise": math.nan}, {"background": 1.1}, {"contrast": -1}, {"blur": 5},
    {"saturation": 1.5}, {"hue_shift": 2}, {"clutter": 16}, {"clutter": -1}, {"clutter": 2.0}, {"cue": -0.1},
    {"jitter": 4}, {"jitter": 0.5}, {"scale": 0.4}, {"scale": 2}, {"decoy": 1.1}, {"decoy": -0.1},
    {"texture": 1.5}, {"texture": -1}, {"offset": 8}, {"offset": -1}, {"offset": 0.5}, {"rendering": "doted"},
    {"task": "lose"}, {"task": "match", "decoy": 0.5}, {"task": "match", "pointer": 1},
]  # fmt: skip
SCENES = [
    {"noise": -1}, {"most": MOST + 1}, {"fewest": 4, "most": 3}, {"smallest": 30}, {"smallest": 12.5},
    {"overlap": 0.5},
]  # fmt: skip
SEVERITIES = [("nois", 1), ("Blur", 1), ("noise", -0.1), ("noise", 5.5), ("harder resample", 6)]


@pytest.mark.parametrize(
    "call",
    [
        *(lambda world=world: World(**world) for world in WORLDS),
        *(lambda world=world: SceneWorld(**world) for world in SCENES),
        *(
            lambda shift=shift, call=call: call(*shift, size=1)
            for shift in (*SEVERITIES, ("rendering", math.nan))
            for call in (shifted, shifted_images)
        ),
        *(lambda call=call: call("valid", 1) for call in (generate, generate_phrases, generate_scenes)),
        *(lambda call=call: call("train", 0) for call in (generate, generate_phrases, generate_scenes)),
        lambda: generate("train", 1, twin="evil"),
    ],
)
def test_values(call):
    with pytest.raises(ValueError):
        call()
