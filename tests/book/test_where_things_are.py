"""What the sentences of page D5 say of oracles that are spoiled, and of the teacher, is so."""

import re
from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest
import torch

from atbook.worlds.scenes import SceneWorld, generate_scenes, scene_objects
from atfamily.detection.objects import Found
from atfamily.detection.precision import THRESHOLDS, average_precision
from atlib.attention import walk
from atlib.mae import patchify
from tests.book.test_taught import NOTEBOOKS, committed
from tests.helpers import ROOT

NAME = "where-things-are"


def text() -> str:
    """The notebook's, without the comments that hold its numbers."""
    source = (NOTEBOOKS / f"{NAME}.md").read_text(encoding="utf-8")
    return " ".join(re.sub(r"<!--.*?-->", "", source, flags=re.S).split())


# --- The sentences about spoiled oracles ---


@cache
def objects():
    return scene_objects(generate_scenes("test", 100)).objects


def precision(change=lambda boxes: boxes, keep=slice(None), twice=1, at=THRESHOLDS):
    predictions = [
        Found(
            torch.cat(twice * [change(scene.boxes)[keep]]),
            torch.cat(twice * [scene.labels[keep]]),
            torch.linspace(1, 0, twice * len(scene.boxes[keep])),
        )
        for scene in objects()
    ]
    return 100 * average_precision(predictions, objects(), at)


def to_patches(boxes, less):
    corner, opposite = boxes.split(2, 1)
    return torch.cat([8 * (corner / 8).floor() + less, 8 * (opposite / 8).ceil() - less], 1)


def test_what_the_sentences_say_of_oracles():
    assert precision() == precision(twice=2) == 100
    left = precision(keep=slice(None, None, 2))
    assert left == pytest.approx(precision(keep=slice(None, None, 2), at=[0.5])), "what is left out, no more"
    assert left > 50
    known = [precision(partial(to_patches, less=less)) for less in range(8)]
    half, strict = (precision(partial(to_patches, less=3), at=[at]) for at in (0.5, 0.75))
    ap = known[3]
    assert ap == max(known), "makes the best of it"
    said = text()
    words = r"reaches (\S+) at the mildest threshold, and its AP is (\S+)\. Keep that number"
    assert re.search(words, said).groups() == (f"{half:.1f}", f"{ap:.1f}")
    assert f"Will it beat the {ap:.1f} of the oracle" in said
    assert f"At a threshold of 0.75 the detector wins easily, where the oracle scores {strict:.1f}." in said
    again = (
        r"knows only which patches hold an object reaches an AP of (\S+), though it scores (\S+) at the"
        r" mildest threshold"
    )
    assert re.search(again, said).groups() == (f"{ap:.1f}", f"{half:.1f}")
    assert precision(torch.tensor([8, 0, 8, 0]).add) < ap


# --- The sentences about the teacher ---


def test_noise_alone_leaves_what_the_pages_say():
    """Of a hidden patch's variance, 1 of itself less its mean, the noise's share."""
    noisy, clean = (
        patchify(torch.from_numpy(generate_scenes("validation", 300, world=world).images) / 255, (8, 8))
        for world in (SceneWorld(), replace(SceneWorld(), noise=0.0))
    )
    noise = (noisy - clean) - (noisy - clean).mean(-1, keepdim=True)
    left = (noise.square().mean(-1) / noisy.var(-1)).mean().item()
    mean_leaves = (noisy.var(-1, correction=0) / noisy.var(-1)).mean().item()
    page = " ".join((ROOT / "book" / "results.md").read_text(encoding="utf-8").split())
    said = re.search(r"with its mean leaves (\d+) %, and no painter could leave less than the (\d+) %", page)
    assert said.groups() == (f"{100 * mean_leaves:.0f}", f"{100 * left:.0f}")
    assert f"Of the hidden pixels' variance {100 * left:.0f} % is noise, which nobody can guess" in text()


@torch.no_grad()
def test_the_teachers_patches_look_where_the_sentence_says():
    drawn = generate_scenes("test", 100)
    pixels = drawn.instances.reshape(100, 8, 8, 8, 8).transpose(0, 1, 3, 2, 4).reshape(100, 64, 64)
    owner = np.zeros((100, 64), int)
    for image, patch in np.ndindex(100, 64):
        counts = np.bincount(pixels[image, patch], minlength=2)
        if counts[1:].max() > 16:  # more than a quarter of the patch
            owner[image, patch] = 1 + counts[1:].argmax()
    layers = walk(committed("teacher", "scenes"), scene_objects(drawn).take(range(100))[0], head=False).layers
    maps = np.stack([layer.map[:, :, 1:, 1:].mean(1).numpy() for layer in layers])
    own, of_mean, evenly = [], [], []
    for image, patch in zip(*np.nonzero(owner)):
        same = owner[image] == owner[image, patch]
        same[patch] = False
        if same.any():
            own.append(maps[:, image, patch][:, same].sum(-1))
            of_mean.append(maps.mean(1)[:, patch][:, same].sum(-1))
            evenly.append(same.sum() / 65)
    own, of_mean = 100 * np.mean(own, axis=0), 100 * np.mean(of_mean, axis=0)
    said = re.search(
        r"In the last layer the teacher's patches give (\S+) % of their attention to other patches of their"
        r" object\. Its mean map would give (\S+) %, and equal shares for all tokens (\S+) %\. ",
        text(),
    )
    assert said.groups() == (f"{own[3]:.1f}", f"{of_mean[3]:.1f}", f"{100 * np.mean(evenly):.1f}")
    assert all(own > of_mean), "more than nearness, in every layer"
