"""What stands beside the maps of a model on one image: its features, and a gradient."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from atlib._util import in_eval_mode
from atlib.attention import Instead, Seen, walk

OUTLIER = 2.0  # a patch whose norm is above so many medians is an outlier


class Panels(NamedTuple):
    """Of each layer that is kept: the features are the residual stream after it, where the walk sees one."""

    #: Lengths of all tokens' features, (layers, N), float32; None where no stream is seen.
    norms: Tensor | None
    #: The patches' first three principal components as colours, (layers, P, 3), uint8; None likewise.
    components: Tensor | None
    gradient: Tensor  #: What the maps' gradients give to each patch (`gradients`), (layers, P), float32.


def cosines(features: Tensor) -> Tensor:
    """The cosines between the features (N, D) of all tokens, (N, N), float64; negative ones as 0."""
    directions = nn.functional.normalize(features.double(), dim=-1)
    return (directions @ directions.mT).clamp(0, 1)


def components(features: Tensor) -> Tensor:
    """The first three principal components of features (P, D) as red, green and blue, each from its smallest
    to its largest value, as in DINOv2 (arXiv 2304.07193): (P, 3), uint8."""
    centred = features.double() - features.double().mean(0)
    U, S, _ = torch.linalg.svd(centred, full_matrices=False)
    three = nn.functional.pad(U * S, (0, 3))[:, :3]
    # signs are free: the largest number is positive
    three = three * three.gather(0, three.abs().argmax(0, keepdim=True)).sign()
    low, high = three.amin(0), three.amax(0)
    return (255 * (three - low) / (high - low).clamp(min=1e-12)).round().to(torch.uint8)


def outliers(norms: Tensor) -> Tensor:
    """Which patches have norms (..., P) above twice their median: truths. Darcet et al. 2024 (arXiv
    2309.16588) choose a bound for each model by its histogram."""
    return norms > OUTLIER * norms.median(-1, keepdim=True).values


def gradients(
    vit: nn.Module, images: Tensor, seen: Sequence[Seen], layers: Sequence[int]
) -> dict[int, Tensor]:
    """The positive part of the gradient of the model's answer for a layer's map, those of other layers held,
    mean over its heads and queries: {layer: (N,)}. images: (1, 3, height, width); seen: the layers of a walk
    without gradients. The answer is the largest logit of a model with a class head, else half the squared
    length of its output. LeGrad (Bousselham et al. 2025, arXiv 2404.03214) has this of the last layer.
    """
    leaves = {layer: seen[layer].map.detach().clone().requires_grad_() for layer in layers}
    held = {
        i: Instead(map=block.map)
        if block.q is None or block.attend is not None
        else Instead(q=block.q, k=block.k, scale=block.scale, bias=block.bias, mask=block.mask)
        for i, block in enumerate(seen)
    }
    replaced = held | {layer: Instead(map=leaf) for layer, leaf in leaves.items()}
    gradient_of: dict[int, Tensor] = {}
    for layer, leaf in leaves.items():

        def reduce(leaf: Tensor, layer: int = layer) -> None:
            gradient_of[layer] = leaf.grad[0].clamp(min=0).double().mean((0, 1)).cpu()
            leaf.grad = None  # one layer's gradient exists at a time

        leaf.register_post_accumulate_grad_hook(reduce)
    with torch.enable_grad(), in_eval_mode(vit):
        output = walk(vit, images, replace=replaced).logits
        score = output.float().square().sum() / 2
        kind = type(vit).__name__
        classifies = getattr(vit, "num_classes", 0) > 0 or "Classification" in kind or "Classifier" in kind
        if classifies and output.ndim == 2:
            score = output.amax()
        score.backward(inputs=list(leaves.values()))
    return gradient_of
