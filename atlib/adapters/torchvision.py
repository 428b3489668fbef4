"""torchvision's `VisionTransformer`: `vit_b_16` and its like."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torchvision.models.vision_transformer import EncoderBlock, VisionTransformer

from atlib.adapters.adapter import Adapter, Sizes, Unwalkable
from atlib.adapters.multihead import MultiheadLayer, Parts
from atlib.attention import Layer
from atlib.timm_config import Settings, vit_settings

STOCK = EncoderBlock.forward, VisionTransformer.forward


class TorchvisionViT(Adapter):
    """A ViT of torchvision."""

    blocks_at = "encoder.layers"

    def check(self) -> None:
        """Look at the classes of the blocks, and at methods that were replaced."""
        model, name = self.model, type(self.model).__name__
        if (EncoderBlock.forward, type(model).forward) != STOCK:
            raise Unwalkable(f"cannot walk a {name}: it has its own forward, which walk does not know")
        for index, block in enumerate(self.blocks):
            if not isinstance(block, EncoderBlock) or type(block).forward is not STOCK[0]:
                kind = type(block).__name__
                raise Unwalkable(f"cannot walk layer {index} of this {name}, a {kind}: EncoderBlock is known")

    def embed(self, images: Tensor) -> tuple[Tensor, Sequence[Layer]]:
        """See `Adapter`."""
        model = self.model
        tokens = model._process_input(images)
        tokens = torch.cat([model.class_token.expand(len(tokens), -1, -1), tokens], 1)
        tokens = model.encoder.dropout(tokens + model.encoder.pos_embedding)
        return tokens, [MultiheadLayer(block, _parts(block)) for block in self.blocks]

    def head(self, tokens: Tensor) -> Tensor:
        """See `Adapter`."""
        return self.model.heads(self.model.encoder.ln(tokens)[:, 0])

    def sizes(self) -> Sizes:
        """See `Adapter`."""
        model, attn = self.model, self.blocks[0].self_attention
        side = model.image_size // model.patch_size
        image = model.image_size, model.image_size
        return Sizes(len(self.blocks), attn.num_heads, attn.head_dim, (side, side), image, (1, 0, 0))

    def settings(self, layer_scale_init: float | None = None) -> Settings:
        """See `Adapter`."""
        model, block, sizes = self.model, self.blocks[0], self.sizes()
        if not isinstance(model.conv_proj, nn.Conv2d):
            raise ValueError("this VisionTransformer has a convolutional stem, which timm's ViT cannot have")
        return vit_settings(
            img_size=sizes.image,
            patch_size=(model.patch_size, model.patch_size),
            embed_dim=model.hidden_dim,
            depth=sizes.depth,
            num_heads=sizes.heads,
            hidden=model.mlp_dim,
            norm_layer=partial(nn.LayerNorm, eps=block.ln_1.eps),
        )


def _parts(block: EncoderBlock) -> Parts:
    return Parts(block.ln_1, block.self_attention, block.dropout, block.ln_2, block.mlp, None)


def adapter_for(model: nn.Module) -> TorchvisionViT:
    """The adapter of a model of torchvision. Raises `Unwalkable` for one that is no ViT."""
    if not isinstance(model, VisionTransformer):
        raise Unwalkable(
            f"cannot walk a {type(model).__name__}: of torchvision, VisionTransformer is walked (vit_b_16,"
            " vit_l_32 ...); the others have no map over all tokens"
        )
    return TorchvisionViT(model)
