"""Linear attention in place of softmax attention, in any model that `walk` sees: a map that is made of
features of queries and keys, φ(q) φ(k)ᵀ with rows normalised, need not be written out, and costs time and
memory that grow with N, not N².

Sources: Katharopoulos et al. 2020 (arXiv 2006.16236), linear attention and elu + 1; Zhang et al. 2024,
Hedgehog (arXiv 2402.04347), learned features that are trained by the cross-entropy of maps; Zhang et al.
2025, LoLCATs (arXiv 2410.10254), the squared error of outputs.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from atlib._util import require_known
from atlib.attention import Instead, Seen, Walk, attend, walk
from atlib.attention_transfer import Transferred
from atlib.compatibility import sizes_of
from atlib.losses import dense_attention_cross_entropy, note
from atlib.pair import Normalisation, Pair

LEAST = 1e-12  # of a feature, as published: no row of a map is without a sum to divide by


class Hedgehog(nn.Module):
    """Hedgehog's features: x (B, H, N, d) to (B, H, N, 2d), the softmax over d of x W beside that of -x W,
    with a learned W (d, d) for each head, at first the identity. The paper has exp in place of softmax, too;
    the softmax is its stable form, and that of LoLCATs' published code, which has no bias either, and a W
    that is random at first."""

    def __init__(self, heads: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(width).repeat(heads, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Features of queries or keys."""
        x = x @ self.weight
        return torch.cat([x.softmax(-1), (-x).softmax(-1)], -1).clamp(min=LEAST)


class EluPlusOne(nn.Module):
    """The plain features, elu(x) + 1: x (B, H, N, d) to the same shape. Nothing is learned."""

    def __init__(self, heads: int, width: int):
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        """Features of queries or keys."""
        return (nn.functional.elu(x) + 1).clamp(min=LEAST)


def linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Features of queries and keys (B, H, N, f), above 0, and values (B, H, N, d) to (B, H, N, d): the map q
    kᵀ, rows divided by their sum, times v, without the map."""
    return q @ (k.mT @ v) / (q @ k.sum(2, keepdim=True).mT)


class LinearAttention(nn.Module):
    """A model with linear attention in every layer: its own weights and forward, and for each layer the
    features of queries and those of keys, (2, layers) modules in `features`. `features` makes one from the
    number of heads and their width. Weight decay takes positions and tokens too, which it leaves out of a
    ViT's. Raises `Unwalkable` as `walk` does."""

    not_walkable = "its attention is linear: take its own walk(images), or walk its .model"

    def __init__(self, model: nn.Module, features: Callable[[int, int], nn.Module] = Hedgehog):
        super().__init__()
        sizes = sizes_of(model)
        self.model = model
        self.features = nn.ModuleList(
            nn.ModuleList(features(sizes.heads, sizes.head_width) for _ in range(sizes.depth)) for _ in "qk"
        )

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """What a layer makes of queries, keys and values (B, H, N, d): (B, H, N, d)."""
        of_queries, of_keys = self.features
        return linear_attention(of_queries[layer](q), of_keys[layer](k), v)

    def walk(self, images: Tensor) -> Walk:
        """What happens inside the model for images (B, 3, height, width); a layer's `map` is linear
        attention's."""
        layers = range(len(self.features[0]))
        return walk(self.model, images, replace={i: Instead(attend=partial(self.attend, i)) for i in layers})

    def forward(self, images: Tensor) -> Tensor:
        """The model's answer to images (B, 3, height, width), such as logits (B, classes)."""
        return self.walk(images).logits


class LinearTransfer(Pair):
    """Distill from a model with softmax attention into one with linear attention, layer by layer.

    what: "map", the book's cross-entropy (Hedgehog), or "output", the squared error of what attention makes
    of the values, the mean over (B, H, N, d) of each layer, summed over layers (LoLCATs, whose published code
    takes the mean over layers, behind the projection of the heads). Where the teacher
    is the student's own `.model`, each layer's features are given the teacher's q, k and v, which have no
    gradients: only features learn, and a model is given another attention (LoLCATs' first stage, which
    multiplies its loss by 1,000). `.student` is the result. To *copy* the teacher's maps, copy into `.model`:
    with a given map both kinds of attention are one.
    """

    def __init__(
        self,
        teacher: nn.Module,
        student: LinearAttention,
        what: str = "map",
        *,
        normalisation: Normalisation | None = None,
    ):
        require_known("what", what, ("map", "output"))
        both = sizes_of(teacher), sizes_of(student.model)
        sizes = [(x.depth, x.heads, x.head_width, x.grid, x.prefix) for x in both]
        if sizes[0] != sizes[1]:
            raise ValueError(f"(depth, heads, width, grid, prefix): teacher {sizes[0]}, student {sizes[1]}")
        super().__init__(student, teacher, normalisation=normalisation)
        self.what = what

    @property
    def needs_teacher(self) -> bool:
        """False: after training, `.student` alone is the result."""
        return False

    def forward(self, images: Tensor) -> Transferred:
        """Student logits (B, classes) and the unweighted transfer loss for images (B, 3, height, width), or
        for pairs (B, 2, 3, height, width) of what the student and what the teacher sees."""
        images, shown = (images[:, 0], images[:, 1]) if images.ndim == 5 else (images, images)
        if not (self.training or torch.is_grad_enabled()):
            logits = self.student(images)
            return Transferred(logits, logits.new_full((), torch.nan))
        teacher = self.teacher_layers(shown)
        seen = self.student.walk(images)
        student = seen.layers
        if self.teacher is self.student.model:
            attends = (partial(self.student.attend, layer) for layer in range(len(teacher)))
            student = [layer._replace(attend=by) for layer, by in zip(teacher, attends)]
        losses = (self.loss(*layers) for layers in zip(student, teacher))
        return Transferred(
            seen.logits, sum(note(f"transfer_loss/layer_{i}", x) for i, x in enumerate(losses))
        )

    def loss(self, student: Seen, teacher: Seen) -> Tensor:
        """The loss of one layer, a scalar."""
        if self.what == "map":
            return dense_attention_cross_entropy([student], [teacher])
        return nn.functional.mse_loss(attend(student), attend(teacher))

    def teacher_layers(self, images: Tensor) -> list[Seen]:
        """What the teacher's layers saw, as constants."""
        with self.frozen_teachers():
            layers = walk(self.teacher, self.for_teacher(images), head=False).layers
        # clones outlive inference mode, which autograd needs
        return [seen._replace(q=seen.q.clone(), k=seen.k.clone(), v=seen.v.clone()) for seen in layers]
