"""What page D3 writes out by hand, linear CKA in two forms, features within classes, disagreement and the
mean of two opinions, is what atlib computes, and what loops give."""

import pytest
import torch

from atfamily.measures import predictions as measures
from atlib.analysis import linear_cka
from tests.book.test_taught import taught
from tests.helpers import random_images

NAME = "same-features-same-mistakes"


def features(rows: int, columns: int, seed: int) -> torch.Tensor:
    x = random_images(rows + columns, columns, seed=seed, dtype=torch.float64)
    return x[:rows] @ x[rows:] + 3


def related(rows: int, p: int, q: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Features that share a part, so that CKA is neither 0 nor 1."""
    x, y = features(rows, p, 1), features(rows, q, 2)
    shared = min(p, q)
    y[:, :shared] += 2 * x[:, :shared]
    return x, y


@pytest.mark.parametrize("rows, p, q", [(40, 5, 7), (12, 30, 4), (9, 20, 20)])
def test_both_forms_are_linear_cka(rows, p, q):
    x, y = related(rows, p, q)
    by_hand = taught(NAME)
    assert 0.1 < linear_cka(x, y) < 0.99
    assert by_hand.cka_from_images(x, y).item() == pytest.approx(linear_cka(x, y), abs=1e-10)
    assert by_hand.cka_from_features(x, y).item() == pytest.approx(linear_cka(x, y), abs=1e-10)


def test_hsic_is_the_mean_product_of_doubly_centred_similarities():
    x, y = (features.tolist() for features in related(8, 3, 4))
    n = len(x)

    def centred(rows):
        table = [[sum(a * b for a, b in zip(one, other)) for other in rows] for one in rows]
        means, mean = [sum(row) / n for row in table], sum(map(sum, table)) / n**2
        return [[table[i][j] - means[i] - means[j] + mean for j in range(n)] for i in range(n)]

    K, L = centred(x), centred(y)
    expected = sum(K[i][j] * L[i][j] for i in range(n) for j in range(n)) / (n - 1) ** 2
    x, y = (torch.tensor(features, dtype=torch.float64) for features in (x, y))
    assert taught(NAME).hsic(x @ x.T, y @ y.T).item() == pytest.approx(expected, rel=1e-10)


def test_within_classes():
    x, labels = features(30, 4, 5), torch.arange(30) % 3 * 2  # classes 0, 2, 4
    before, rest = x.clone(), taught(NAME).within_classes(x, labels)
    assert torch.equal(x, before)
    for i in range(30):
        mean = [sum(x[j, f].item() for j in range(30) if labels[j] == labels[i]) / 10 for f in range(4)]
        assert rest[i].tolist() == pytest.approx([x[i, f].item() - mean[f] for f in range(4)], abs=1e-10)
    assert linear_cka(rest, torch.nn.functional.one_hot(labels).double()) < 1e-20


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
    different, together = measures.disagreement(a, b), measures.ensemble_accuracy(a, b, labels)
    assert 0 < different < 1 and 0 < together < 1
    assert taught(NAME).disagreement(a, b).item() == pytest.approx(different)
    assert taught(NAME).ensemble_accuracy(a, b, labels).item() == pytest.approx(together)


def answers(right: torch.Tensor, labels: torch.Tensor, classes: int) -> torch.Tensor:
    """Probabilities of a model that answers rightly where it is told to, else with any other class."""
    wrong = (labels + torch.randint(1, classes, labels.shape)) % classes
    return torch.nn.functional.one_hot(torch.where(right, labels, wrong), classes).double()


@pytest.mark.parametrize("accuracy_a, accuracy_b", [(0.9, 0.7), (0.5, 0.95), (0.3, 0.2)])
def test_position_is_0_for_nested_and_1_for_independent_mistakes(accuracy_a, accuracy_b):
    torch.manual_seed(0)
    images, classes = 100_000, 8
    labels = torch.randint(classes, (images,))
    luck = torch.rand(2, images)
    a = answers(luck[0] < accuracy_a, labels, classes)
    by_hand = taught(NAME)
    independent = by_hand.disagreement(a, answers(luck[1] < accuracy_b, labels, classes))
    assert by_hand.position(independent, accuracy_a, accuracy_b) == pytest.approx(1, abs=0.03)
    least = abs(accuracy_a - accuracy_b)
    assert by_hand.position(least, accuracy_a, accuracy_b) == 0
