"""Exercises of chapter 7, Only the queries."""

import torch
from torch import Tensor

from atbook.exercises.inputs import normal
from atbook.exercises.judging import Exercise, told

# --- 7.1 ---


def disguise(q: Tensor, k: Tensor, A: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Queries q A, and keys, shifted by c, that make the same map with them."""
    return q @ A, k @ A.inverse().mT + c


def by_solving(q: Tensor, k: Tensor, A: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """The same without an inverse: A k'ᵀ = kᵀ, one key after the other."""
    keys = torch.linalg.solve(A, k.mT).mT
    return torch.einsum("bhnd,de->bhne", q, A), keys + c


# --- 7.2 ---


def blind_error(q_s: Tensor, q_t: Tensor) -> Tensor:
    """The smallest mean squared error over one orthogonal matrix a head."""
    source, target = (q.transpose(0, 1).flatten(1, 2) for q in (q_s, q_t))  # (H, B·N, d)
    U, _, Vh = torch.linalg.svd(source.mT @ target)
    return (source @ U @ Vh - target).square().mean()


def by_singular_values(q_s: Tensor, q_t: Tensor) -> Tensor:
    """The same without the matrix: |q_s|² + |q_t|² minus twice the sum of the singular values."""
    products = torch.einsum("bhnd,bhne->hde", q_s, q_t)
    squares = q_s.square().sum() + q_t.square().sum()
    return (squares - 2 * torch.linalg.svdvals(products).sum()) / q_s.numel()


def turned_back(q_s, q_t):
    """The best matrix was used transposed, so queries are turned the wrong way. For q_sᵀ q_t = U S Vᵀ it is U
    Vᵀ, from the right."""
    source, target = (q.transpose(0, 1).flatten(1, 2) for q in (q_s, q_t))
    U, _, Vh = torch.linalg.svd(source.mT @ target)
    return (source @ (U @ Vh).mT - target).square().mean()


def other_order(q_s, q_t):
    """The best matrix was made in the other order, Vᵀ U. For q_sᵀ q_t = U S Vᵀ it is U Vᵀ: `U @ Vh`."""
    source, target = (q.transpose(0, 1).flatten(1, 2) for q in (q_s, q_t))
    U, _, Vh = torch.linalg.svd(source.mT @ target)
    return (source @ Vh @ U - target).square().mean()


def any_matrix(q_s, q_t):
    """You allowed any matrix (least squares), which also stretches. Queries that are far too small, and make
    nearly even maps, would then cost nothing."""
    source, target = (q.transpose(0, 1).flatten(1, 2) for q in (q_s, q_t))
    return (source @ torch.linalg.lstsq(source, target).solution - target).square().mean()


def a_matrix_for_each_head(heads: int, width: int, seed: int) -> Tensor:
    """Orthogonal matrices: (H, d, d)."""
    return torch.linalg.qr(normal(heads, width, width, seed=seed)).Q


def turned_queries() -> tuple[Tensor, Tensor]:
    """Queries, and the same in other coordinates."""
    q = normal(3, 2, 5, 4)
    return q, q @ a_matrix_for_each_head(2, 4, seed=9)


EXERCISES = (
    Exercise(
        "7.1",
        subject="queries and keys",
        right=disguise,
        cases={
            "2 heads": lambda: (
                normal(2, 2, 5, 3),
                normal(2, 2, 5, 3, seed=1),
                normal(3, 3, seed=2),
                normal(3, seed=3),
            ),
            "a stretch along one axis": lambda: (
                normal(1, 1, 4, 2, seed=4),
                normal(1, 1, 4, 2, seed=5),
                torch.tensor([[2.0, 0.0], [0.0, 1.0]], dtype=torch.float64),
                torch.tensor([0.0, 3.0], dtype=torch.float64),
            ),
        },
        also_right=(by_solving,),
        wrong={
            "You multiplied keys by A, too. That leaves the map alone only where A Aᵀ = 1, as for"
            " a rotation: from (q A)(k M)ᵀ = q kᵀ follows M = (A⁻¹)ᵀ.": lambda q, k, A, c: (q @ A, k @ A + c),
            "You multiplied keys by A⁻¹. Keys enter transposed:"
            " (q A)(k M)ᵀ = q A Mᵀ kᵀ, so Mᵀ = A⁻¹.": lambda q, k, A, c: (q @ A, k @ A.inverse() + c),
            "The keys were not adapted, so the map is different."
            " A model with other queries needs other keys.": lambda q, k, A, c: (q @ A, k + c),
            "You shifted the queries. That adds c · k_j to the scores, which"
            " differs from key to key, and a softmax sees it. A shift of all keys"
            " adds q_i · c, the same for the whole row.": lambda q, k, A, c: (q @ A + c, k @ A.inverse().mT),
            "The map is right, but the shift was done before the multiplication: the new keys are shifted"
            " by c (A⁻¹), not by c. Add it last.": lambda q, k, A, c: (q @ A, (k + c) @ A.inverse().mT),
        },
        see="Distill Q",
    ),
    Exercise(
        "7.2",
        subject="losses",
        right=blind_error,
        cases={
            "turned queries": turned_queries,
            "other queries": lambda: (normal(3, 2, 5, 4), normal(3, 2, 5, 4, seed=1)),
            "one head": lambda: (normal(2, 1, 6, 3), normal(2, 1, 6, 3, seed=4)),
        },
        also_right=(by_singular_values,),
        wrong={
            "Queries were centred first. Other coordinates turn about"
            " 0; a shift of all queries changes maps, and has to"
            " cost.": lambda q_s, q_t: blind_error(*(q - q.mean((0, 2), keepdim=True) for q in (q_s, q_t))),
            "That is the plain squared error, which sees every rotation. Turn q_s first,"
            " by the matrix that brings it nearest to q_t.": lambda q_s, q_t: (q_s - q_t).square().mean(),
            "One matrix mixes the channels of all heads. A map is made inside"
            " a head: each has a matrix of its own, and none may mix them.": lambda *queries: blind_error(
                *(q.transpose(1, 2).flatten(2).unsqueeze(1) for q in queries)
            ),
            "Every image got a matrix of its own, which fits too well. Coordinates come from weights, and"
            " those are the same for all images: one matrix a head for the whole batch.": lambda *queries: (
                torch.stack([blind_error(a[None], b[None]) for a, b in zip(*queries)]).mean()
            ),
            **told(turned_back, other_order, any_matrix),
        },
        see="Distill Q",
        atol=1e-8,
    ),
)
