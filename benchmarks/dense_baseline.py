"""Attention transfer the straightforward way, to compare with: every map of teacher and student is written
out in float32 and kept.

In the style of the published code of arXiv 2411.09702, in our own words: the teacher runs from end to end,
its head included; attention is an explicit softmax of q kᵀ in float32, in every layer of both models; in Copy
the student still projects to q, k and v in one product; Distill is a cross-entropy between stored maps.
Nothing here is used by `atlib`.
"""

from collections.abc import Mapping, Sequence

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from atlib.attention_transfer import Transferred


class DenseTransfer(nn.Module):
    """Copy (`how="copy"`) or Distill (`how="distill"`) of the maps of `layers`. The teacher is frozen in
    place and not registered."""

    def __init__(
        self, teacher: VisionTransformer, student: VisionTransformer, how: str, layers: Sequence[int]
    ):
        super().__init__()
        self.student, self.how, self.layers = student, how, tuple(layers)
        self._teacher = (teacher.eval().requires_grad_(False),)

    def forward(self, images: Tensor) -> Transferred:
        """Student logits (B, classes) and the unweighted transfer loss (0 for Copy) for images (B, 3, height,
        width)."""
        with torch.no_grad():
            _, _, targets = dense_forward(self._teacher[0], images, {})
        if self.how == "copy":
            logits, _, _ = dense_forward(self.student, images, {i: targets[i] for i in self.layers})
            return Transferred(logits, logits.new_zeros(()))
        logits, scores, _ = dense_forward(self.student, images, {})
        return Transferred(logits, sum(cross_entropy_of_maps(scores[i], targets[i]) for i in self.layers))


def dense_forward(
    vit: VisionTransformer, images: Tensor, maps: Mapping[int, Tensor]
) -> tuple[Tensor, list, list]:
    """Logits, and every layer's scores and map, (B, H, N, N) float32 each; a layer in `maps` uses that map
    and has no scores."""
    tokens = vit.norm_pre(vit._pos_embed(vit.patch_embed(images)))
    all_scores, all_maps = [], []
    for index, block in enumerate(vit.blocks):
        mixed, scores, attention_map = dense_attention(block.attn, block.norm1(tokens), maps.get(index))
        tokens = tokens + block.ls1(mixed)
        tokens = tokens + block.ls2(block.mlp(block.norm2(tokens)))
        all_scores.append(scores)
        all_maps.append(attention_map)
    return vit.forward_head(vit.norm(tokens)), all_scores, all_maps


def dense_attention(attn: nn.Module, x: Tensor, p: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
    """Attention of x (B, N, D) through an explicit map: the output (B, N, D), scores and map (B, H, N, N) in
    float32."""
    B, N, _ = x.shape
    q, k, v = attn.qkv(x).reshape(B, N, 3, attn.num_heads, attn.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
    scores, attention_map = None, p
    if p is None:
        with torch.autocast(x.device.type, enabled=False):
            scores = (attn.q_norm(q).float() * attn.scale) @ attn.k_norm(k).float().mT
            attention_map = scores.softmax(-1)
    return attn.proj((attention_map @ v).transpose(1, 2).reshape(B, N, -1)), scores, attention_map


def cross_entropy_of_maps(scores: Tensor, target: Tensor) -> Tensor:
    """-Σ_j p_t(i, j) log p_s(i, j), mean over batch, heads and queries, from the student's scores and the
    teacher's map (B, H, N, N)."""
    return -(target * scores.log_softmax(-1)).sum(-1).mean()
