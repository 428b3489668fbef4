"""What notebook 14 writes out by hand, disagreement, ensembles, calibration and the bootstrap, is what atlib
computes."""

import pytest
import torch

from atlib import analysis
from tests.book.test_taught import taught

NAME = "14-same-mistakes"


def predictions(seed: int, images: int = 400, classes: int = 5) -> tuple[torch.Tensor, ...]:
    """Two models of different strength that share some of their mistakes, and the labels."""
    torch.manual_seed(seed)
    labels = torch.randint(classes, (images,))
    shared, *own = torch.randn(3, images, classes, dtype=torch.float64)
    strength = torch.nn.functional.one_hot(labels, classes)
    return (shared + own[0] + 2 * strength).softmax(-1), (shared + own[1] + strength).softmax(-1), labels


@pytest.mark.parametrize("seed", [0, 1])
def test_disagreement_and_ensemble(seed):
    a, b, labels = predictions(seed)
    different, together = analysis.disagreement(a, b), analysis.ensemble_accuracy(a, b, labels)
    assert 0 < different < 1 and 0 < together < 1
    assert taught(NAME).disagreement(a, b).item() == pytest.approx(different)
    assert taught(NAME).ensemble_accuracy(a, b, labels).item() == pytest.approx(together)


@pytest.mark.parametrize("bins", [1, 4, 15])
def test_calibration_error(bins):
    a, _, labels = predictions(3)
    expected = analysis.expected_calibration_error(a, labels, bins)
    assert expected > 0.001
    assert float(taught(NAME).calibration_error(a, labels, bins)) == pytest.approx(expected, abs=1e-12)


def test_bootstrap_is_near_the_normal_interval_and_near_atlibs():
    a, b, labels = predictions(4, images=2000)
    right = [p.argmax(1) == labels for p in (a, b)]
    mean, low, high = (value.item() for value in taught(NAME).paired_bootstrap(*right))
    difference = right[0].double() - right[1].double()
    centre, error = difference.mean().item(), difference.std(correction=0).item() / 2000**0.5
    assert mean == pytest.approx(centre)
    # An end of the interval from 2,000 draws is itself uncertain by about 0.06 standard errors.
    assert [low, high] == pytest.approx([centre - 1.96 * error, centre + 1.96 * error], abs=0.25 * error)
    atlibs = analysis.paired_bootstrap(*right)
    assert [low, high] == pytest.approx([atlibs.low, atlibs.high], abs=0.35 * error)


def test_bootstrap_is_paired():
    """Two models that are right on the same images do not differ, whatever images are drawn."""
    right = torch.arange(50) % 3 == 0
    assert [value.item() for value in taught(NAME).paired_bootstrap(right, right, samples=100)] == [0, 0, 0]
