"""Average precision against a loop, votes against a count, and rankings on a condition."""

import math

import pytest
import torch

from atfamily.measures.retrieval import conditional_scores, mean_average_precision, neighbour_votes
from tests.helpers import random_images


def average_precision(scores, relevant):
    """One query, the long way: rank, and at every relevant one the share of relevant ones so far."""
    order = sorted((i for i, score in enumerate(scores) if score != -math.inf), key=lambda i: -scores[i])
    found, precisions = 0, []
    for rank, index in enumerate(order, start=1):
        if relevant[index]:
            found += 1
            precisions.append(found / rank)
    return sum(precisions) / len(precisions)


def labelled(n, classes=4, seed=0):
    return torch.randint(classes, (n,), generator=torch.Generator().manual_seed(seed))


def test_mean_average_precision_is_that_of_a_loop():
    scores, relevant = random_images(7, 30), labelled(7)[:, None] == labelled(30, seed=1)
    scores[:, 25:] = -math.inf  # left out
    expected = [average_precision(row, hits) for row, hits in zip(scores.tolist(), relevant.tolist())]
    assert mean_average_precision(scores, relevant) == pytest.approx(sum(expected) / 7, abs=1e-6)


def test_votes_are_those_of_the_nearest():
    similar, labels = random_images(6, 25), labelled(25, 3)
    votes = neighbour_votes(similar, labels, k=4, temperature=0.5)
    for row, vote in zip(similar.tolist(), votes.tolist()):
        nearest = sorted(range(25), key=lambda i: -row[i])[:4]
        weights = [math.exp(row[i] / 0.5) for i in nearest]
        for label in range(3):
            mass = sum(w for i, w in zip(nearest, weights) if labels[i] == label)
            assert vote[label] == pytest.approx(mass / sum(weights), abs=1e-5)


def test_conditional_scores_by_hand():
    similar = random_images(2, 3)
    of_queries, of_gallery = torch.rand(2, 4).softmax(1), torch.rand(3, 4).softmax(1)
    scores = conditional_scores(similar, of_queries, of_gallery, 0.1)
    for q in range(2):
        for n in range(3):
            alike = sum(of_queries[q, c].item() * of_gallery[n, c].item() for c in range(4))
            expected = similar[q, n].item() / 0.1 + math.log(alike)
            assert scores[q, n].item() == pytest.approx(expected, abs=1e-4)
