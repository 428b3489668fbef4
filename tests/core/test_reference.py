"""A training step of the published implementation, reproduced by atlib."""

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from atlib import AttentionTransfer, Plan, create_vit
from atlib.map_free import by_blocks, by_fused_attention
from tests.helpers import ROOT, SMALL_VIT

LAMBDA = 3.0  # the files' gradients are those of task_loss + 3 distill_loss


class Reference:
    def __init__(self, name):
        with np.load(ROOT / "tests" / "reference" / f"{name}.npz") as file:
            self.values = {key: torch.from_numpy(file[key]) for key in file.files}

    def weights(self, prefix):
        start = f"{prefix}."
        return {n.removeprefix(start): x for n, x in self.values.items() if n.startswith(start)}

    def vit(self, prefix):
        vit = create_vit(SMALL_VIT)
        vit.load_state_dict(self.weights(prefix), strict=True)
        return vit.train()

    def __getitem__(self, name):
        return self.values[name]


def off(found, expected):
    """The largest difference relative to the largest value."""
    return ((found - expected).abs().max() / expected.abs().max()).item()


def assert_gradients(student, reference):
    """All published gradients are met, and what has none there has none here."""
    expected = reference.weights("grad")
    for name, parameter in student.named_parameters():
        if name in expected:
            assert off(parameter.grad, expected[name]) <= 1e-4, name
        else:
            assert parameter.grad is None or not parameter.grad.any(), name


PLANS = {"copy": Plan(how="copy"), "copy_q": Plan(what="q", how="copy"), "distill": Plan(how="distill")}
WAYS = [("copy", by_blocks), ("copy_q", by_blocks), ("distill", by_blocks), ("distill", by_fused_attention)]


@pytest.mark.parametrize("name, how", WAYS, ids=lambda value: getattr(value, "__name__", value))
def test_step_of_the_published_implementation(monkeypatch, name, how):
    monkeypatch.setattr("atlib.losses.map_free_cross_entropy", how)
    reference = Reference(name)
    pair = AttentionTransfer(reference.vit("teacher"), reference.vit("student"), PLANS[name]).train()
    assert pair.path == "map-free"
    found = pair(reference["x"])
    task_loss = cross_entropy(found.logits, reference["y"].long())
    assert off(found.logits, reference["logits"]) <= 1e-5
    assert off(task_loss, reference["task_loss"]) <= 1e-5
    if name != "distill":
        assert found.transfer_loss.item() == reference["distill_loss"].item() == 0
    else:
        assert off(found.transfer_loss, reference["distill_loss"]) <= 1e-5
    (task_loss + LAMBDA * found.transfer_loss).backward()
    assert_gradients(pair.student, reference)
