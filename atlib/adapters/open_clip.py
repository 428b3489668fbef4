"""open_clip's vision towers: its own `VisionTransformer`, and a timm ViT inside its `TimmModel`."""

from collections.abc import Sequence
from functools import partial

from open_clip.timm_model import TimmModel
from open_clip.transformer import QuickGELU, ResidualAttentionBlock, VisionTransformer
from timm.layers import QuickGELU as TimmQuickGELU
from torch import Tensor, nn

from atlib.adapters.adapter import Adapter, Sizes, Unwalkable
from atlib.adapters.multihead import MultiheadLayer, Parts
from atlib.attention import Layer
from atlib.timm_config import Settings, vit_settings

STOCK = ResidualAttentionBlock.forward, ResidualAttentionBlock.attention


class OpenClipViT(Adapter):
    """The vision tower of an open_clip model, `model.visual`: its logits are the image's embedding."""

    blocks_at = "transformer.resblocks"

    @property
    def checkpointing(self) -> bool:
        """Whether open_clip's `set_grad_checkpointing` was called."""
        return self.model.transformer.grad_checkpointing

    def check(self) -> None:
        """Look at the classes of the blocks, and at methods that were replaced."""
        for index, block in enumerate(self.blocks):
            same = isinstance(block, ResidualAttentionBlock)
            if not same or (type(block).forward, type(block).attention) != STOCK:
                name, kind = type(self.model).__name__, type(block).__name__
                raise Unwalkable(
                    f"cannot walk layer {index} of this {name}, a {kind}: ResidualAttentionBlock is known"
                )

    def embed(self, images: Tensor) -> tuple[Tensor, Sequence[Layer]]:
        """See `Adapter`."""
        return self.model._embeds(images), [MultiheadLayer(block, _parts(block)) for block in self.blocks]

    def head(self, tokens: Tensor) -> Tensor:
        """The image's embedding, (B, width of the embedding)."""
        pooled, _ = self.model._pool(tokens)
        return pooled if self.model.proj is None else pooled @ self.model.proj

    def output(self, images: Tensor) -> Tensor:
        """See `Adapter`; without the tokens that some towers return beside it."""
        found = self.model(images)
        return found[0] if isinstance(found, tuple) else found

    def sizes(self) -> Sizes:
        """See `Adapter`."""
        model, attn = self.model, self.blocks[0].attn
        grid, image = tuple(model.grid_size), tuple(model.image_size)
        return Sizes(len(self.blocks), attn.num_heads, attn.head_dim, grid, image, (1, 0, 0))

    def settings(self, layer_scale_init: float | None = None) -> Settings:
        """See `Adapter`."""
        model, block, sizes = self.model, self.blocks[0], self.sizes()
        activation = TimmQuickGELU if isinstance(block.mlp.gelu, QuickGELU) else type(block.mlp.gelu)
        return vit_settings(
            img_size=sizes.image,
            patch_size=tuple(model.patch_size),
            embed_dim=model.conv1.out_channels,
            depth=sizes.depth,
            num_heads=sizes.heads,
            hidden=block.mlp.c_fc.out_features,
            pre_norm=isinstance(model.ln_pre, nn.LayerNorm),
            act_layer=activation,
            init_values=None if isinstance(block.ls_1, nn.Identity) else layer_scale_init or 1e-5,
            norm_layer=partial(nn.LayerNorm, eps=block.ln_1.eps),
            global_pool="avg" if model.pool_type == "avg" else "token",
        )


def _parts(block: ResidualAttentionBlock) -> Parts:
    return Parts(block.ln_1, block.attn, block.ls_1, block.ln_2, block.mlp, block.ls_2)


def adapter_for(model: nn.Module) -> OpenClipViT:
    """The adapter of an open_clip vision tower. Raises `Unwalkable`, saying what to pass, for what is
    none."""
    if isinstance(model, VisionTransformer):
        return OpenClipViT(model)
    if isinstance(model, TimmModel):
        raise Unwalkable("cannot walk a TimmModel: it is a wrapper; pass the timm ViT inside, its .trunk")
    if isinstance(getattr(model, "visual", None), nn.Module):
        kind = type(model).__name__
        raise Unwalkable(f"cannot walk a {kind}, which reads images and text: pass its vision tower, .visual")
    raise Unwalkable(
        f"cannot walk a {type(model).__name__}: of open_clip, the VisionTransformer in .visual is walked"
    )
