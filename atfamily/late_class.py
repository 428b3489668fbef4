"""A ViT whose class token comes late: the first layers are for patches alone, the others as ever."""

import torch
from timm.models import checkpoint_seq
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn


class LateClassViT(VisionTransformer):
    """timm's ViT, whose class token joins the patches before layer `insert_at` (from 0) and is no part of the
    layers before.

    options: `VisionTransformer`'s. Its layers have different tokens, so that no pair has it. Source: Touvron
    et al. 2021 (arXiv 2103.17239), section 3; Touvron's thesis, table 3.13.
    """

    def __init__(self, insert_at: int, **options):
        super().__init__(**options)
        depth = len(self.blocks)
        if not 0 <= insert_at < depth:
            raise ValueError(f"insert_at={insert_at}: a layer from 0 to {depth - 1}")
        if self.cls_token is None or self.num_prefix_tokens != 1:
            raise ValueError(f"{self.num_prefix_tokens} prefix tokens: only a class token can come late")
        self.insert_at = insert_at

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, classes) for images (B, 3, height, width)."""
        return self.forward_head(self.forward_features(images))

    def forward_features(self, images: Tensor) -> Tensor:
        """All tokens after the final norm, (B, N, D), for images (B, 3, height, width)."""
        tokens = self.norm_pre(self.patch_drop(self._pos_embed(self.patch_embed(images))))
        class_token, patches = tokens[:, :1], tokens[:, 1:]
        patches = self._through(self.blocks[: self.insert_at], patches)
        tokens = self._through(self.blocks[self.insert_at :], torch.cat([class_token, patches], 1))
        return self.norm(tokens)

    def _through(self, blocks: nn.Sequential, tokens: Tensor) -> Tensor:
        return checkpoint_seq(blocks, tokens) if self.grad_checkpointing and blocks else blocks(tokens)
