"""What is transferred, in numbers an image, and what it costs: in floating-point operations (multiply and add
counted apart) and in bytes.

FLOPs are the fewest a training step can do, from the architecture alone. Counted are matrix products: patch
embedding, linear layers, head, and the two products of attention. Norms, softmax, GELU, the optimiser and the
losses' own sums are not. The backward pass of a product is two products of the same size, one for each factor
that needs a gradient. Nothing is computed twice; `atlib`, which makes maps anew in order to keep none, spends
a few `Shape.mixing` more.

Memory is read off the tensors that a step holds, not off an allocator: the same on every run and every CPU.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from timm.layers import Mlp
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from atlib.compatibility import sizes_of
from atlib.pair import Pair
from atlib.vit import create_vit, without_weights


class Numbers(NamedTuple):
    """How many numbers a teacher hands over for one image, all layers together, by kind of activation."""

    q: int
    k: int
    v: int
    map: int
    features: int


class MethodCost(NamedTuple):
    """One method's cost: FLOPs of a training step and of inference on a batch, weights kept for inference."""

    method: str
    step_flops: int
    inference_flops: int
    parameters_kept: int


class Memory(NamedTuple):
    """Bytes that a training step holds. weights: the trained model's parameters and buffers; gradients: one
    number for each parameter that is trained; optimizer: AdamW's two moments of it; saved: what autograd
    keeps of the forward pass for the backward pass, images included; teacher: its weights."""

    weights: int
    gradients: int
    optimizer: int
    saved: int
    teacher: int

    @property
    def total(self) -> int:
        """All of it. Not all is there at one time: `saved` is let go while `gradients` come into being."""
        return sum(self)


def transferred_numbers(vit: VisionTransformer | Eva) -> Numbers:
    """Numbers an image in the activations of all layers: q, k, v L·H·N·d each, maps L·H·N², features (the
    residual stream) L·N·D. Shapes alone are read, so that a model on the meta device does. Source: the
    comparison is that of arXiv 2411.09702, for ViT-L."""
    sizes = sizes_of(vit)
    L, H, N = sizes.depth, sizes.heads, sizes.prefix + sizes.grid[0] * sizes.grid[1]
    one = L * H * N * sizes.head_width
    return Numbers(one, one, one, L * H * N * N, L * N * vit.embed_dim)


def method_costs(
    name_or_config: str | Mapping,
    image_size: int | None = None,
    batch: int = 1,
    layers: int | None = None,
    teacher: str | Mapping | None = None,
) -> list[MethodCost]:
    """The fewest FLOPs of a step and of inference, and the weights kept, of training from scratch,
    fine-tuning, Copy, Distill, and training a new head alone or attention alone.

    The student is `create_vit(name_or_config)`; so is the teacher, unless `teacher` names another model. The
    teacher's weights are those that are fine-tuned. Images have `image_size` pixels a side (None: their own).
    The maps of the first `layers` layers are transferred (None: all of the student's). Pre-training is not
    counted. Copy keeps teacher and student, the others one of them. No weights are made.
    """
    vit = _weightless(name_or_config, image_size)
    taught_by = vit if teacher is None else _weightless(teacher, image_size)
    shape, other = shape_of(vit), shape_of(taught_by)
    layers = shape.depth if layers is None else layers
    if batch < 1 or not 1 <= layers <= shape.depth:
        raise ValueError(f"batch={batch}, layers={layers}: at least one image, and 1 to {shape.depth} layers")
    weights, other_weights = (sum(p.numel() for p in model.parameters()) for model in (vit, taught_by))
    counts = {
        "scratch": (fine_tuning(shape), plain(shape), weights),
        "fine-tune": (fine_tuning(other), plain(other), other_weights),
        "copy": (copy(shape, layers, other), copy_inference(shape, layers, other), weights + other_weights),
        "distill": (distill(shape, layers, other), plain(shape), weights),
        "frozen probe": (probing(other), plain(other), other_weights),
        "fine-tune attention": (attention_tuning(other), plain(other), other_weights),
    }
    return [
        MethodCost(method, batch * step, batch * inference, kept)
        for method, (step, inference, kept) in counts.items()
    ]


def step_memory(
    model: nn.Module, images: Tensor, loss: Callable[[nn.Module, Tensor], Tensor] | None = None
) -> Memory:
    """What a training step of `model` holds on a batch of images (B, 3, height, width), in bytes; one forward
    pass is run, with no step taken.

    `model`: a ViT, `AttentionTransfer` or another module that `train` takes, in training mode. Every storage
    that autograd keeps is counted once and whole; weights are not counted again, nor what comes and goes
    within an operation. The kernels that run on a GPU keep other things. loss: what is trained, of the model
    and the images; None: cross-entropy, of made-up labels.
    """
    from atlib.objectives import outputs  # brings Accelerate, which takes seconds to import

    if not model.training or any(getattr(module, "grad_checkpointing", False) for module in model.modules()):
        raise ValueError("step_memory needs model.train(), and no activation checkpointing")
    teachers = model.teachers if isinstance(model, Pair) else [getattr(model, "teacher", None)]
    weights = _sizes([*model.parameters(), *model.buffers()])
    frozen = _sizes([x for vit in teachers if vit is not None for x in (*vit.parameters(), *vit.buffers())])
    kept: list[Tensor] = []
    # `append` gives the graph None to keep: one that held its own tensors would never be let go.
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.detach()), lambda nothing: None):
        if loss is None:
            logits = outputs(model, images).logits
            labels = logits.new_zeros(len(logits), dtype=torch.long)
            nn.functional.cross_entropy(logits, labels)  # for what it keeps
        else:
            loss(model, images)
    saved = {key: size for key, size in _sizes(kept).items() if key not in weights and key not in frozen}
    gradients = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    return Memory(sum(weights.values()), gradients, 2 * gradients, sum(saved.values()), sum(frozen.values()))


def _weightless(name_or_config: str | Mapping, image_size: int | None) -> VisionTransformer | Eva:
    with without_weights():
        return create_vit(name_or_config, **({} if image_size is None else {"img_size": image_size}))


def _sizes(tensors: list[Tensor]) -> dict[int, int]:
    """The storages behind some tensors, {key: bytes}; a key is a storage's own only while it is alive."""
    return {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}


class Shape(NamedTuple):
    """What the count depends on. tokens: N; patches: P; depth: L; width: D; hidden: of the MLP; pixels:
    numbers in a patch."""

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
    stock = isinstance(vit, VisionTransformer) and vit.attn_pool is None
    if not (stock and isinstance(vit.blocks[0].mlp, Mlp)):
        raise ValueError(f"no stock ViT, a {type(vit).__name__}: torch.utils.flop_counter counts it")
    patches, pixels = vit.patch_embed.num_patches, vit.patch_embed.proj.weight[0].numel()
    tokens, hidden = vit.num_prefix_tokens + patches, vit.blocks[0].mlp.fc1.out_features
    classes = getattr(vit.head, "out_features", 0)  # an Identity when there is no head
    return Shape(tokens, patches, len(vit.blocks), vit.embed_dim, hidden, pixels, classes)


def fine_tuning(shape: Shape) -> int:
    """Forward and backward of the plain model; images need no gradient, which is a product less."""
    return 2 * shape.embed + 3 * (shape.depth * shape.block + shape.head)


def probing(shape: Shape) -> int:
    """A new head on a frozen model: its forward pass, and the gradient of the head's weights."""
    return plain(shape) + shape.head


def attention_tuning(shape: Shape) -> int:
    """All attention layers and the head, everything else frozen: no gradients of the MLPs' weights and of the
    patch embedding, nor of what the first attention layer reads."""
    saved = shape.block - 4 * shape.projection - 2 * shape.mixing  # in each block the MLP's weights
    return fine_tuning(shape) - shape.embed - 3 * shape.projection - shape.depth * saved


def copy(shape: Shape, layers: int | None = None, of: Shape | None = None) -> int:
    """Copy of the first `layers` layers' maps (None: all): no q, k, scores, no gradient of a map there. of:
    the shape of the teacher, where it is another."""
    layers = shape.depth if layers is None else layers
    saved = 3 * 2 * shape.projection + (3 + 1) * shape.mixing
    return teacher(of or shape, layers) + fine_tuning(shape) - layers * saved


def query_copy(shape: Shape) -> int:
    """Copy of the queries of all layers: no projection to q, and scores with a gradient for keys alone."""
    only_queries = shape.projection + shape.mixing  # the teacher's last layer ends at q: no k, no scores
    saved = 3 * shape.projection + shape.mixing
    return teacher(shape, shape.depth) - only_queries + fine_tuning(shape) - shape.depth * saved


def distill(shape: Shape, layers: int | None = None, of: Shape | None = None) -> int:
    """Distillation of the first `layers` layers' maps (None: all); p_s - p_t of its loss is no product. of:
    the shape of the teacher, where it is another."""
    return teacher(of or shape, shape.depth if layers is None else layers) + fine_tuning(shape)


def feature_distillation(
    shape: Shape, layers: int | None = None, of: Shape | None = None, projectors: int = 0
) -> int:
    """Distillation of the residual stream up to the last of the teacher's `layers` layers (None: all): so
    many blocks of the teacher, without its head. of: its shape, where it is another; projectors: from the
    student's width to its, so many."""
    of = of or shape
    projection = 3 * product(shape.tokens, shape.width, of.width)  # forward, and two gradients
    layers = of.depth if layers is None else layers
    return of.embed + layers * of.block + fine_tuning(shape) + projectors * projection


def teacher(shape: Shape, layers: int) -> int:
    """The teacher's forward pass up to the scores of the last of `layers` layers, and nothing after."""
    return shape.embed + (layers - 1) * shape.block + 2 * shape.projection + shape.mixing


def plain(shape: Shape) -> int:
    """The plain model, forward: inference with everything but Copy."""
    return shape.embed + shape.depth * shape.block + shape.head


def copy_inference(shape: Shape, layers: int, of: Shape | None = None) -> int:
    """Inference with Copy of the first `layers` layers: the teacher, and a student without q, k, scores. of:
    the shape of the teacher, where it is another."""
    return teacher(of or shape, layers) + plain(shape) - layers * (2 * shape.projection + shape.mixing)
