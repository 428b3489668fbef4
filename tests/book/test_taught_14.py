"""What notebook 14 writes out by hand, disagreement, ensembles, calibration and the bootstrap, is what atlib
computes, and what loops give."""

import pytest
import torch

from atlib import analysis
from tests.book.test_taught import taught

NAME = "14-same-mistakes"


def predictions(
    seed: int, images: int = 400, classes: int = 5
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two models of different strength that share some of their mistakes, and the labels."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (images,), generator=generator)
    shared, *own = torch.randn(3, images, classes, generator=generator, dtype=torch.float64)
    strength = torch.nn.functional.one_hot(labels, classes)
    return (shared + own[0] + 2 * strength).softmax(-1), (shared + own[1] + strength).softmax(-1), labels


def best(row: list[float]) -> int:
    return max(range(len(row)), key=lambda c: row[c])


@pytest.mark.parametrize("seed", [0, 1])
def test_disagreement_and_ensemble(seed):
    a, b, labels = predictions(seed)
    by_hand = taught(NAME)
    rows = list(zip(a.tolist(), b.tolist(), labels.tolist()))
    different = sum(best(p) != best(q) for p, q, _ in rows) / len(rows)
    together = sum(best([(x + y) / 2 for x, y in zip(p, q)]) == label for p, q, label in rows) / len(rows)
    assert 0 < different < 1
    assert by_hand.disagreement(a, b).item() == pytest.approx(different)
    assert by_hand.disagreement(a, b).item() == pytest.approx(analysis.disagreement(a, b))
    assert by_hand.ensemble_accuracy(a, b, labels).item() == pytest.approx(together)
    assert by_hand.ensemble_accuracy(a, b, labels).item() == pytest.approx(
        analysis.ensemble_accuracy(a, b, labels)
    )


@pytest.mark.parametrize("bins", [1, 4, 15])
def test_calibration_error(bins):
    a, _, labels = predictions(3)
    gathered = [[] for _ in range(bins)]
    for row, label in zip(a.tolist(), labels.tolist()):
        b = next(b for b in range(bins) if max(row) <= (b + 1) / bins)
        gathered[b].append((max(row), best(row) == label))
    expected = sum(abs(sum(r for _, r in inside) - sum(c for c, _ in inside)) for inside in gathered) / len(a)
    assert expected > 0.001
    assert float(taught(NAME).calibration_error(a, labels, bins)) == pytest.approx(expected, abs=1e-12)
    assert float(taught(NAME).calibration_error(a, labels, bins)) == pytest.approx(
        analysis.expected_calibration_error(a, labels, bins), abs=1e-12
    )


def test_a_model_that_says_80_and_is_right_in_80_of_100_is_calibrated():
    p = torch.tensor([[0.8, 0.2]], dtype=torch.float64).expand(100, -1)
    labels = (torch.arange(100) >= 80).long()
    assert float(taught(NAME).calibration_error(p, labels)) == pytest.approx(0, abs=1e-12)
    assert float(taught(NAME).calibration_error(p, torch.zeros(100, dtype=torch.long))) == pytest.approx(0.2)


def test_bootstrap_is_near_the_normal_interval_and_near_atlibs():
    a, b, labels = predictions(4, images=2000)
    right = [p.argmax(1) == labels for p in (a, b)]
    mean, low, high = (value.item() for value in taught(NAME).paired_bootstrap(*right))
    difference = [int(x) - int(y) for x, y in zip(*(r.tolist() for r in right))]
    centre = sum(difference) / 2000
    error = (sum((d - centre) ** 2 for d in difference) / 2000) ** 0.5 / 2000**0.5
    assert mean == pytest.approx(centre)
    # An end of the interval from 2,000 draws is itself uncertain by about 0.06 standard errors.
    assert [low, high] == pytest.approx([centre - 1.96 * error, centre + 1.96 * error], abs=0.25 * error)
    atlibs = analysis.paired_bootstrap(*right)
    assert [low, high] == pytest.approx([atlibs.low, atlibs.high], abs=0.35 * error)


def test_bootstrap_is_paired():
    """Two models that are right on the same images do not differ, whatever images are drawn."""
    right = torch.arange(50) % 3 == 0
    assert [value.item() for value in taught(NAME).paired_bootstrap(right, right, samples=100)] == [0, 0, 0]
