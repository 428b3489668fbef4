"""Masked auto-encoding: make a teacher of images alone."""

from functools import partial

import torch
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from atlib.attention import Walk
from atlib.recipe import Recipe
from atlib.vit import through_blocks, walk_tokens


class MaskedAutoencoder(nn.Module):
    """Masked auto-encoding of a ViT, `.vit`: hide most patches, encode the visible ones, decode the hidden
    ones' pixels; the loss is the mean squared error on these, each patch normalised to mean 0 and variance 1.
    Source: He et al. 2022 (arXiv 2111.06377). Departures: positions are learned, not fixed sines; the decoder
    is not shown the class token, and of a ViT that averages its patches it reads what no norm has seen; first
    weights are timm's, the decoder's PyTorch's."""

    not_walkable = "it paints hidden patches: walk its .vit"

    def __init__(
        self,
        vit: VisionTransformer,
        mask_ratio: float = 0.75,
        decoder_width: int = 64,
        decoder_depth: int = 2,
        decoder_heads: int = 4,
    ):
        super().__init__()
        P = vit.patch_embed.num_patches
        self.visible = round(P * (1 - mask_ratio))
        if not 0 < self.visible < P:
            raise ValueError(f"mask_ratio={mask_ratio} leaves {self.visible} of {P} patches visible")
        self.vit = vit
        pixels = vit.patch_embed.patch_size[0] * vit.patch_embed.patch_size[1] * 3
        self.to_decoder = nn.Linear(vit.embed_dim, decoder_width)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, decoder_width))
        self.decoder_positions = nn.Parameter(torch.empty(1, P, decoder_width))
        norm = partial(nn.LayerNorm, eps=1e-6)
        block = partial(Block, decoder_width, decoder_heads, qkv_bias=True, norm_layer=norm)
        blocks = [block() for _ in range(decoder_depth)]
        self.decoder = nn.Sequential(*blocks, norm(decoder_width), nn.Linear(decoder_width, pixels))
        for parameter in (self.mask_token, self.decoder_positions):
            nn.init.normal_(parameter, std=0.02)

    def no_weight_decay(self) -> set[str]:
        """Positions and tokens; timm asks a model for them by this name."""
        return {"mask_token", "decoder_positions"} | {f"vit.{name}" for name in self.vit.no_weight_decay()}

    def forward(self, images: Tensor, order: Tensor | None = None) -> Tensor:
        """The reconstruction loss for images (B, 3, height, width). order: (B, P), a permutation of the
        patches per image, of which the first `visible` are shown; None draws one."""
        tokens = self.vit._pos_embed(self.vit.patch_embed(images))
        order = self.draw_order(images) if order is None else order
        x = through_blocks(self.vit, _shown(self.vit, tokens, order[:, : self.visible]))
        return self.reconstruction(x, images, order)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Compute the ViT's activations a second time instead of keeping them."""
        self.vit.set_grad_checkpointing(enable)

    def draw_order(self, images: Tensor) -> Tensor:
        """A random permutation of the patches per image: (B, P)."""
        return torch.rand(len(images), self.decoder_positions.shape[1], device=images.device).argsort(1)

    def reconstruction(self, tokens: Tensor, images: Tensor, order: Tensor) -> Tensor:
        """The reconstruction loss from what the ViT's last block gave, (B, prefix + visible, D)."""
        x = self.to_decoder(self.vit.norm(tokens)[:, self.vit.num_prefix_tokens :])  # (B, visible, width)
        hidden = self.mask_token.to(x.dtype).expand(len(x), order.shape[1] - self.visible, -1)
        x = _gather(torch.cat([x, hidden], dim=1), order.argsort(1))  # back to reading order
        guess = self.decoder(x + self.decoder_positions)  # (B, P, pixels)

        target = patchify(images, self.vit.patch_embed.patch_size)
        target = (target - target.mean(-1, keepdim=True)) / (target.var(-1, keepdim=True) + 1e-6).sqrt()
        error = (guess - target).square().mean(-1)  # (B, P)
        return error.gather(1, order[:, self.visible :]).mean()


def walk_visible(
    vit: VisionTransformer, images: Tensor, places: Tensor, *, stop_after: int | None = None
) -> Walk:
    """Walk a ViT that is shown only the patches at `places` (B, visible), after its prefix tokens."""
    tokens = vit._pos_embed(vit.patch_embed(images))
    return walk_tokens(vit, _shown(vit, tokens, places), stop_after=stop_after)


def mae_loss(model: MaskedAutoencoder, images: Tensor, targets: Tensor, recipe: Recipe) -> Tensor:
    """The auto-encoder's own loss; labels are not used."""
    return model(images)


def patchify(images: Tensor, patch_size: tuple[int, int]) -> Tensor:
    """Cut images (B, C, height, width) into patches in reading order: (B, P, C · patch height · width)."""
    return nn.functional.unfold(images, patch_size, stride=patch_size).mT.contiguous()


def _shown(vit: VisionTransformer, tokens: Tensor, places: Tensor) -> Tensor:
    """What the first block is given of tokens (B, N, D): the prefix, and the patches at `places`."""
    prefix, patches = tokens.tensor_split([vit.num_prefix_tokens], dim=1)
    return vit.norm_pre(torch.cat([prefix, _gather(patches, places)], dim=1))


def _gather(tokens: Tensor, index: Tensor) -> Tensor:
    """Pick tokens (B, n, D) by position index (B, m): (B, m, D)."""
    return tokens.gather(1, index[:, :, None].expand(-1, -1, tokens.shape[-1]))
