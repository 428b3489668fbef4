"""What notebook 13 writes out by hand, linear CKA in two forms and features within classes, is what atlib
computes, and what loops give."""

import pytest
import torch

from atlib.analysis import linear_cka
from tests.book.test_taught import taught
from tests.helpers import random_images

NAME = "13-same-features"


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
    x, y = (each.tolist() for each in related(8, 3, 4))
    n = len(x)

    def centred(rows):
        table = [[sum(a * b for a, b in zip(one, other)) for other in rows] for one in rows]
        means, mean = [sum(row) / n for row in table], sum(map(sum, table)) / n**2
        return [[table[i][j] - means[i] - means[j] + mean for j in range(n)] for i in range(n)]

    K, L = centred(x), centred(y)
    expected = sum(K[i][j] * L[i][j] for i in range(n) for j in range(n)) / (n - 1) ** 2
    x, y = (torch.tensor(each, dtype=torch.float64) for each in (x, y))
    assert taught(NAME).hsic(x @ x.T, y @ y.T).item() == pytest.approx(expected, rel=1e-10)


def test_within_classes():
    x, labels = features(30, 4, 5), torch.arange(30) % 3 * 2  # classes 0, 2, 4
    before, rest = x.clone(), taught(NAME).within_classes(x, labels)
    assert torch.equal(x, before)
    for i in range(30):
        mean = [sum(x[j, f].item() for j in range(30) if labels[j] == labels[i]) / 10 for f in range(4)]
        assert rest[i].tolist() == pytest.approx([x[i, f].item() - mean[f] for f in range(4)], abs=1e-10)
    assert linear_cka(rest, torch.nn.functional.one_hot(labels).double()) < 1e-20
