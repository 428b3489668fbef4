"""The fewest floating-point operations a training step can do, from the architecture alone: per image, multiply and add counted apart.

Counted are matrix products: patch embedding, linear layers, head, and the two products of attention. Norms, softmax, GELU, the
optimiser and the losses' own sums are not; they are the rest. The backward pass of a product is two products of the same
size, one for each factor that needs a gradient. Nothing is computed twice: an implementation that keeps every map can reach
these numbers, one that makes maps anew in the backward pass, as fused attention does, cannot.
"""

from typing import NamedTuple

from timm.models.vision_transformer import VisionTransformer


class Shape(NamedTuple):
    """What the count depends on. tokens: N; patches: P; depth: L; width: D; hidden: of the MLP; pixels: numbers in a patch."""

    tokens: int
    patches: int
    depth: int
    width: int
    hidden: int
    pixels: int
    classes: int

    @property
    def embed(self) -> int:
        """Patch embedding, forward."""
        return product(self.patches, self.pixels, self.width)

    @property
    def head(self) -> int:
        """Class head, forward."""
        return product(1, self.width, self.classes)

    @property
    def projection(self) -> int:
        """One of the D to D projections (q, k, v or the output), forward."""
        return product(self.tokens, self.width, self.width)

    @property
    def mixing(self) -> int:
        """One of the two (N, N) products of attention over all heads, q kᵀ or map · v, forward."""
        return product(self.tokens, self.width, self.tokens)

    @property
    def block(self) -> int:
        """One whole block, forward."""
        return 4 * self.projection + 2 * self.mixing + 2 * product(self.tokens, self.width, self.hidden)


def product(rows: int, inner: int, columns: int) -> int:
    """FLOPs of a (rows, inner) by (inner, columns) matrix product."""
    return 2 * rows * inner * columns


def shape_of(vit: VisionTransformer) -> Shape:
    """Read a Shape off a stock timm ViT."""
    patches, weight = vit.patch_embed.num_patches, vit.patch_embed.proj.weight
    classes = getattr(vit.head, "out_features", 0)  # an Identity when there is no head
    return Shape(vit.num_prefix_tokens + patches, patches, len(vit.blocks), vit.embed_dim, vit.blocks[0].mlp.fc1.out_features,
                 weight[0].numel(), classes)


def fine_tuning(shape: Shape) -> int:
    """Forward and backward of the plain model. Images need no gradient, so the patch embedding's backward is one product."""
    return 2 * shape.embed + 3 * (shape.depth * shape.block + shape.head)


def copy(shape: Shape, layers: int | None = None) -> int:
    """Copy of the maps of the first `layers` layers (None: all). The student needs no q, k and no scores there, and its map no gradient."""
    layers = shape.depth if layers is None else layers
    saved = 3 * 2 * shape.projection + (3 + 1) * shape.mixing
    return teacher(shape, layers) + fine_tuning(shape) - layers * saved


def query_copy(shape: Shape) -> int:
    """Copy of the queries of all layers: no projection to q in the student, and scores whose gradient goes to the keys alone."""
    only_queries = shape.projection + shape.mixing  # the teacher's last layer ends at q: no k, no scores
    saved = 3 * shape.projection + shape.mixing
    return teacher(shape, shape.depth) - only_queries + fine_tuning(shape) - shape.depth * saved


def distill(shape: Shape, layers: int | None = None) -> int:
    """Distillation of the first `layers` layers' maps (None: all). The loss adds p_s - p_t to a gradient that exists anyway: no product."""
    return teacher(shape, shape.depth if layers is None else layers) + fine_tuning(shape)


def feature_distillation(shape: Shape) -> int:
    """Distillation of the residual stream after every block: the teacher runs all blocks, without its head."""
    return shape.embed + shape.depth * shape.block + fine_tuning(shape)


def teacher(shape: Shape, layers: int) -> int:
    """The teacher's forward pass up to the map of the last of `layers` layers: its q, k and scores, and nothing after."""
    return shape.embed + (layers - 1) * shape.block + 2 * shape.projection + shape.mixing
