"""Everything random has a stream of its own: no two roles of an experiment start from the same weights."""

from dataclasses import replace
from itertools import combinations

import pytest
import torch

from atbook.lab import scales as schooling
from atbook.lab import study
from atbook.lab.scales import CENTRAL_METHODS, scales
from atbook.lab.study import CENTRAL, Place, Sources, again, scratch, untrained_maps, with_new_head
from atlib.data import Images
from atlib.pair import student_of
from tests import toy
from tests.helpers import same

NUMBERS = Images(torch.zeros(2000, 3, 32, 32, dtype=torch.uint8), torch.arange(2000) % 7)


@pytest.fixture
def untrained(monkeypatch):
    """Teachers as they are before their first step."""
    monkeypatch.setattr(schooling, "train", lambda *given, **options: [{"unlearned": 0.0, "step": 0}])
    monkeypatch.setattr(schooling, "load", lambda *given, **options: NUMBERS)
    small = replace(NUMBERS, pixels=NUMBERS.pixels[..., :16, :16])
    monkeypatch.setattr(schooling, "_cifar10", lambda *given: small)
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
