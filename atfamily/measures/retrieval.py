"""How well features find images of the same class: mean average precision, plain, and on the condition of
what is known of coarser classes. Source of the last: Touvron et al. 2021, "Grafit" (arXiv 2011.12982),
chapter 2 of Touvron's thesis (HAL tel-03945782)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from atfamily.measures.checks import check_features


def cosines(x: Tensor, gallery: Tensor) -> Tensor:
    """Cosine of each query's features (q, D) with each image's of the gallery (n, D): (q, n)."""
    check_features(x, "x", rows=1)
    check_features(gallery, "gallery", rows=1)
    return F.normalize(x.float(), dim=1) @ F.normalize(gallery.float(), dim=1).mT


def mean_average_precision(scores: Tensor, relevant: Tensor) -> float:
    """Average precision of each query's ranking, the mean over queries: from 0 to 1.

    scores: (q, n), the images of the gallery are ranked by them, the largest first; -inf leaves an image out,
    such as the query itself. relevant: (q, n) bool, which are to be found. A query's average precision is the
    mean, over all that it should find, of the share of relevant ones among those ranked no lower; equal
    scores are ranked as they come. Queries with nothing to find are left out.
    """
    if scores.isnan().any():
        raise ValueError(f"scores are NaN for query {scores.isnan().any(1).nonzero()[0].item()}: no ranking")
    if scores.shape != relevant.shape:  # one would be broadcast
        raise ValueError(f"scores {tuple(scores.shape)}, relevant {tuple(relevant.shape)}")
    shown = scores != -torch.inf
    hits = (relevant & shown).gather(1, scores.argsort(dim=1, descending=True, stable=True))
    number = hits.sum(1)
    ranks = torch.arange(1, hits.shape[1] + 1, device=scores.device)
    precision = hits.cumsum(1) / ranks
    average = (precision * hits).sum(1)[number > 0] / number[number > 0]
    return average.double().mean().item()


def neighbour_votes(similarities: Tensor, labels: Tensor, k: int, temperature: float = 0.05) -> Tensor:
    """Class probabilities (q, classes) by the votes of the k most similar labelled images, each weighed by
    exp(similarity / temperature). similarities: (q, n), of queries with images whose labels are (n,); -inf
    leaves an image out."""
    nearest = similarities.topk(k, dim=1)
    weights = (nearest.values / temperature).softmax(1)
    votes = similarities.new_zeros(len(similarities), int(labels.max()) + 1)
    return votes.scatter_add_(1, labels[nearest.indices], weights)


def conditional_scores(
    similarities: Tensor, of_queries: Tensor, of_gallery: Tensor, temperature: float = 0.05
) -> Tensor:
    """Scores (q, n) that rank images by their similarity and by how likely they are of the query's coarse
    class: similarity / temperature + log Σ_c p(c | query) p(c | image).

    similarities: cosines (q, n). of_queries, of_gallery: probabilities of coarse classes, (q, classes) and
    (n, classes), such as `neighbour_votes` gives; one-hot for classes that are known. The joining is our
    reading of the paper's coarse conditioning.
    """
    alike = (of_queries @ of_gallery.mT).clamp(min=torch.finfo(of_queries.dtype).tiny)
    return similarities / temperature + alike.log()
