"""Everything random has a stream of its own: no two roles of an experiment start from the same weights."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch

from atbook.lab import scales as schooling
from atbook.lab import study
from atbook.lab.scales import CENTRAL_METHODS, scales
from atbook.lab.study import CENTRAL, Place, Sources, again, scratch, untrained_maps, with_new_head
from atlib.data import Images
from atlib.data.rng import ROLES, seed_for
from atlib.pair import student_of
from atrun.build import build
from atrun.configure import configure
from tests import toy
from tests.helpers import same

NUMBERS = Images(torch.zeros(2000, 3, 32, 32, dtype=torch.uint8), torch.arange(2000) % 7)


@pytest.fixture
def untrained(monkeypatch):
    """Teachers as they are before their first step."""
    monkeypatch.setattr(schooling, "train", lambda *given, **options: [{"unlearned": 0.0, "step": 0}])
    monkeypatch.setattr(schooling, "load", lambda *given, **options: NUMBERS)
    monkeypatch.setattr(schooling, "load_pacs", lambda *given, **options: NUMBERS)


def drawn(vit):
    """What was drawn, of weights that are not constants: {name: flat float64}."""
    return {
        name: value.detach().double().flatten()
        for name, value in vit.named_parameters()
        if value.numel() > 100 and value.std() > 0
    }


def likeness(left, right):
    """The largest cosine of two tensors of the same name and size."""
    shared = [name for name in left.keys() & right.keys() if left[name].shape == right[name].shape]
    assert len(shared) > 10
    return max(torch.cosine_similarity(left[name], right[name], dim=0).abs().item() for name in shared)


@pytest.mark.parametrize("name", [name for name, scale in scales().items() if scale.makes_teachers])
def test_no_two_roles_share_first_weights(name, untrained, tmp_path):
    scale = replace(scales()[name], unlabelled=40)
    sources = Sources(Place(name, None, tmp_path, tmp_path), scale, 0)
    teacher, *_ = scale.make_teacher(0)
    found = {
        "teacher": teacher,
        "student": scratch(sources),
        "student again": again(scratch, sources),
        "another seed": scratch(sources._replace(seed=1)),
        "another seed's teacher": scale.make_teacher(1)[0],
        "untrained": untrained_maps(sources).teacher,
    }
    weights = {role: drawn(vit) for role, vit in found.items()}
    for left, right in combinations(weights, 2):
        # an entry of about 1,000 numbers: a cosine of independent ones has a standard deviation of 0.03
        assert likeness(weights[left], weights[right]) < 0.2, (left, right)
    if scale.student.build().num_classes == 0:  # detectors' heads: tests/lab/test_detection.py
        return
    head = with_new_head(scale.student.build(), sources).head.weight.detach().flatten().double()
    for role, vit in weights.items():
        if vit.get("head.weight", head[:0]).shape == head.shape:
            assert torch.cosine_similarity(head, vit["head.weight"], dim=0).abs() < 0.2, role


def test_one_seed_gives_every_method_the_same_student(tmp_path, monkeypatch):
    monkeypatch.setattr(study, "scales", toy.known)
    place = toy.place(tmp_path)
    toy.untrained_models(place)
    sources = Sources(place, toy.TOY, 0)
    for method in CENTRAL_METHODS:
        if method == "fine-tune":
            continue
        student = student_of(CENTRAL.variant(method).build(sources))
        assert same(student.state_dict(), scratch(sources).state_dict()), method


def test_streams_differ_by_seed_role_and_repeat():
    seeds = {seed_for(s, r, a) for s in range(20) for r in ROLES for a in range(3)}
    assert len(seeds) == 20 * len(ROLES) * 3 and seed_for(0, "student") == seed_for(0, "student")
    assert all(0 <= seed < 2**32 for seed in seeds)
    with pytest.raises(ValueError, match="pupil"):
        seed_for(0, "pupil")


def test_images_of_labels_and_teacher_are_drawn_apart(untrained, monkeypatch):
    asked = []
    monkeypatch.setattr(schooling, "load", lambda *a, **o: asked.append((o["split"], o["seed"])) or NUMBERS)
    scale = scales()["cifar10-cpu"]
    scale.make_teacher(0), scale.labelled(0), scale.held_out("test")
    assert len(set(asked)) == 3


def test_a_run_does_not_start_a_student_from_its_teachers_first_weights():
    teacher, student = (
        build(configure(recipe, "atbook.worlds:marked_glyphs", changes={"model": "glyphs"}, seed=5), 8).model
        for recipe in ("mae", "find-scratch")
    )
    assert likeness(drawn(teacher.vit), drawn(student)) < 0.2


def test_the_random_parts_are_even():
    ranks = np.array([seed_for(seed, "student") for seed in range(2000)]) / 2**32
    assert abs(ranks.mean() - 0.5) < 0.03 and abs(ranks.std() - 12**-0.5) < 0.02
