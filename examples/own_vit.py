"""A ViT of your own as a teacher: `atlib` has to be told nothing, as long as the class calls
`scaled_dot_product_attention` for its attention."""

import torch
from torch import nn

from atlib import AttentionTransfer, Plan, create_vit, walk


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


def main() -> None:
    """Walk a model of the class, and take one step of Distill with a ViT of timm as its student."""
    teacher = OwnViT()
    print(f"the first layer's maps: {tuple(walk(teacher, torch.randn(4, 3, 32, 32)).layers[0].map.shape)}")
    student = create_vit("glyphs", embed_dim=24, num_heads=3, depth=3, class_token=False, global_pool="avg")
    pair = AttentionTransfer(teacher, student, Plan(how="distill"))
    print(f"the transfer loss is {pair(torch.randn(4, 3, 32, 32)).transfer_loss.item():.3f}")


if __name__ == "__main__":
    main()
