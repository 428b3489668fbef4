"""A ViT of your own as a teacher: what `atlib` has to be told about a class that it does not know."""

import torch
from torch import nn

from atlib import AttentionTransfer, Plan, create_vit
from atlib.adapters import Adapter, Layer, Sizes
from atlib.walking import check_exact


class Block(nn.Module):
    """Your block: here attention and MLP one after another, each after a norm."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm_a, self.norm_m = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens (B, N, D) to tokens."""
        y = self.norm_a(x)
        projected = self.query(y), self.key(y), self.value(y)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in projected)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_m(x))


class OwnViT(nn.Module):
    """Your model: 4 x 4 patches of 8 x 8 pixels, no class token, the mean of all patches."""

    def __init__(self, width: int = 24, heads: int = 3, depth: int = 3, classes: int = 5):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, 8)
        self.positions = nn.Parameter(0.02 * torch.randn(1, 16, width))
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.classify = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Images (B, 3, 32, 32) to logits."""
        x = self.patches(images).flatten(2).mT + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.classify(self.norm(x).mean(1))


# --- From here on: what you write for atlib, some 25 lines ---


class OwnLayer(Layer):
    """How a block goes: what its attention sees, and how it goes on."""

    def __init__(self, block: Block):
        self.module, self.heads = block, block.heads
        self.width = block.query.out_features // block.heads
        self.scale = self.width**-0.5

    def before(self, tokens):  # (B, N, D): what attention is given
        return self.module.norm_a(tokens)

    def project(self, x, needed):  # "qkv" or some of it -> {"q": (B, H, N, d), ...}
        own = {"q": self.module.query, "k": self.module.key, "v": self.module.value}
        return {name: own[name](x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for name in needed}

    # tokens: as they came to the block; x: what `before` made of them; mixed: (B, N, D), the heads' outputs
    # side by side; drop_path: masks of stochastic depth, which this class does not have
    def after(self, tokens, x, mixed, drop_path):
        tokens = tokens + self.module.out(mixed)
        return tokens + self.module.mlp(self.module.norm_m(tokens))


class OwnAdapter(Adapter):
    """How the model embeds images, what its layers are, and what it makes of the tokens."""

    blocks_at = "layers"

    def embed(self, images):  # tokens (B, N, D), and the layers that they go through
        tokens = self.model.patches(images).flatten(2).mT + self.model.positions
        return tokens, [OwnLayer(block) for block in self.blocks]

    def head(self, tokens):  # after the last block -> what the model returns
        return self.model.classify(self.model.norm(tokens).mean(1))

    def sizes(self):
        heads, head_width = self.blocks[0].heads, 8
        prefix = (0, 0, 0)  # class tokens, distillation tokens, registers
        return Sizes(len(self.blocks), heads, head_width, grid=(4, 4), image=(32, 32), prefix_kinds=prefix)


def main() -> None:
    """Check the adapter, and take one step of Distill with a ViT of timm as the student."""
    teacher = OwnAdapter(OwnViT())
    print(f"the walk differs from the model by {check_exact(teacher):.1e}")
    student = create_vit("glyphs", embed_dim=24, num_heads=3, depth=3, class_token=False, global_pool="avg")
    # mismatched=True: nobody can say whether the components of a class of your own are the student's
    pair = AttentionTransfer(teacher, student, Plan(how="distill", mismatched=True))
    print(f"the transfer loss is {pair(torch.randn(4, 3, 32, 32)).transfer_loss.item():.3f}")


if __name__ == "__main__":
    main()
