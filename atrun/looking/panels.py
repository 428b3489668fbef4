"""What stands beside the maps of a model on one image: its features, and a gradient."""

from collections.abc import Sequence
from functools import partial
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
    #: What the maps' gradients give to each patch (`gradients`), (layers, P), float32.
    gradient: Tensor


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
    """The positive part of the gradient of the model's answer for a layer's map, mean over its heads and
    queries: {layer: (N,)}. images: (1, 3, height, width); seen: the layers of a walk. The answer is the
    largest logit of a model with a class head, else half the squared length of its output. LeGrad (Bousselham
    et al. 2025, arXiv 2404.03214) has this of the last layer.
    """
    maps: dict[int, Tensor] = {}

    def attend(q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        map = seen[layer]._replace(q=q, k=k).map  # with its graph: later maps hang on an earlier one
        maps[layer] = map if map.requires_grad else map.detach().requires_grad_()
        return maps[layer].to(v.dtype) @ v

    given = {*layers, *(layer for layer, one in enumerate(seen) if one.given is not None)}
    with torch.enable_grad(), in_eval_mode(vit):
        replace = {layer: Instead(attend=partial(attend, layer=layer)) for layer in given}
        output = walk(vit, images, replace=replace).logits
        score = output.float().square().sum() / 2
        kind = type(vit).__name__
        classifies = getattr(vit, "num_classes", 0) > 0 or "Classification" in kind or "Classifier" in kind
        if classifies and output.ndim == 2:
            score = output.amax()
        found = torch.autograd.grad(score, [maps[layer] for layer in layers])
    return {
        layer: gradient[0].clamp(min=0).double().mean((0, 1)).cpu() for layer, gradient in zip(layers, found)
    }
