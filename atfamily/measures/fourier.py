"""Which spatial frequencies a layer's features hold: attention smooths, and this shows how much."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from atlib.analysis import vit_of, walks
from atlib.data import Images
from atlib.maps import Grid, check_grid

FLOOR = 1e-6  # added to amplitudes before the logarithm, as in the published code; features are of order 1


class FourierProfile(NamedTuple):
    """frequency: (F,) from 0 to 1, in units of π per patch; log_amplitude: (F,), natural logarithm relative
    to frequency 0."""

    frequency: Tensor
    log_amplitude: Tensor


def fourier_profile(tokens: Tensor, grid: Grid, prefix_tokens: int) -> FourierProfile:
    """The log-amplitudes of feature maps (B, N, D) along the diagonal of their 2-D Fourier transform,
    relative to frequency 0.

    Every channel of every image is transformed over the patch `grid`, prefix tokens left out; the logarithms
    of the amplitudes are averaged over images and channels, and read at frequency k down *and* across, 2k/n
    in units of π, for k = 0 to n/2. The grid must be square. Source: Park & Kim 2022 (arXiv 2202.06709),
    figure 2a, and its published code, whose frequency axis is stretched: it puts the last frequency below π
    at π.
    """
    rows, columns = grid = check_grid(tokens.shape[1], grid, prefix_tokens)
    if rows != columns:
        raise ValueError(f"grid={grid}: the diagonal profile needs a square patch grid")
    maps = tokens[:, prefix_tokens:].double().unflatten(1, (rows, columns))  # (B, rows, columns, D)
    diagonal = torch.fft.fft2(maps, dim=(1, 2)).diagonal(dim1=1, dim2=2)  # (B, D, n)
    k = torch.arange(rows // 2 + 1, device=tokens.device)  # the other half mirrors it
    log_amplitude = (diagonal[..., k].abs() + FLOOR).log().mean((0, 1))
    return FourierProfile(2 * k.double() / rows, log_amplitude - log_amplitude[0])


def layer_profiles(model: nn.Module, images: Images, batch_size: int = 100) -> list[FourierProfile]:
    """The `fourier_profile` of the residual stream after every block of a model, over a data set, on the CPU.
    model: a ViT or an `AttentionTransfer`, of which the student is looked at."""
    vit = vit_of(model)
    totals, count = [torch.zeros((), dtype=torch.float64) for _ in vit.blocks], 0
    for (seen,) in walks([model], images, batch_size):
        count += len(seen.tokens)  # not all of `images`, where some cannot be decoded
        grid, prefix_tokens = vit.patch_embed.grid_size, vit.num_prefix_tokens
        profiles = [fourier_profile(tokens, grid, prefix_tokens) for tokens in seen.stream]
        totals = [
            total + len(seen.tokens) * profile.log_amplitude.cpu() for total, profile in zip(totals, profiles)
        ]
    return [FourierProfile(profiles[0].frequency.cpu(), total / count) for total in totals]
