"""AttnDistill: one self-supervised ViT teaches a smaller one its class token and where that token looks, and
nothing else.

Source: Wang, Yang, van de Weijer 2022, "Attention Distillation: self-supervised vision transformer students
need more guidance" (arXiv 2210.00944). What is said here of "the published code" was read in
github.com/wangkai930418/attndistill.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from atfamily.locality import forbids_pairs
from atlib._util import require_known
from atlib.attention import Seen, walk
from atlib.attention_transfer import Transferred
from atlib.baselines import Distillation
from atlib.maps import aggregate_heads, resample_class_attention, rescale
from atlib.pair import Normalisation
from atlib.vit import check_timm

# the published code clamps probabilities there; here only resampled ones, which an interpolation can make 0
FLOOR = 1e-5


class Losses(NamedTuple):
    """What a step computes. `logits`: (B, classes), the student's; `alignment`: scalar, of the class tokens;
    `divergence`: scalar, of the class token's attention, unweighted, in nats unless `compare` is another."""

    logits: Tensor
    alignment: Tensor
    divergence: Tensor


def row_divergence(log_p_s: Tensor, p_t: Tensor) -> Tensor:
    """KL(p_t ‖ p_s) of rows (B, N), the student's as logarithms: in nats, summed over keys, mean over the
    batch."""
    return nn.functional.kl_div(log_p_s, p_t, reduction="batchmean")


def row_squared_error(log_p_s: Tensor, p_t: Tensor) -> Tensor:
    """The squared error between rows (B, N), the student's given as logarithms: summed over keys, mean over
    the batch. The supplement of arXiv 2210.00944 (table 10, f) tried a squared error and does not say how it
    was summed; so this is ours."""
    return (log_p_s.exp() - p_t).square().sum(-1).mean()


def pool_heads(map: Tensor, how: str) -> Tensor:
    """The "max", "mean" or "min" over the heads, each row rescaled to sum to 1: (B, H, N, N) to (B, 1, N, N),
    or rows alone, (B, H, 1, N) to (B, 1, 1, N). Source: AttnDistill (arXiv 2210.00944), supplement; that rows
    are rescaled is ours."""
    if map.ndim != 4:
        raise ValueError(f"maps are (B, H, queries, keys), got {tuple(map.shape)}")
    ways = {"max": map.amax, "mean": map.mean, "min": map.amin}
    require_known("pooling", how, ways)
    pooled = ways[how](1, keepdim=True)
    return rescale(pooled, torch.ones_like(pooled[..., :1]))


class AttnDistill(Distillation):
    """A student whose class token shall be the teacher's, and look where the teacher's looks in the last
    layer.

    In training the transfer loss is alignment + attention_weight · divergence. Alignment: mean squared error
    between the projected final class token of the student and that of the teacher, each after its own final
    norm, mean over batch and width. Divergence: KL(p_t ‖ p_s), summed over keys, mean over the batch, where p
    is the class token's row of the last layer's map, all heads merged by softmax(Σ_h log p_h / temperature).
    Teacher and student may differ in width, depth and heads. Without labels, as in the paper:
    `Recipe(task_weight=0.0, transfer_weight=1.0)`. `.student` alone is the result.

    `resample`: a teacher with another patch grid is let in, its class attention is resampled to the
    student's, head by head. `drop_prefix`: so is one with other prefix tokens; then only class token and
    patches count in both, rows renormalised. `hidden_width`: of the projector's wide layers, None for twice
    the student's; `projector_layers`: how many it has. `merge`: what makes one row of the heads' rows, (B, H,
    1, N) to (B, 1, 1, N), in place of the product and its temperature, such as `pool_heads` with a `how`.
    `compare`: what measures the divergence, `row_divergence` or `row_squared_error`. `by_value`: before heads
    are merged, each share is weighted by the length of the value it goes to, p ‖v‖, in both models, and rows
    are scaled to sum to 1 (the score of Fayyaz et al. 2022, arXiv 2111.15667).

    Source: arXiv 2210.00944. Both losses with their reductions, temperature 10 and weight 0.1 were read in
    the published code and its scripts, not in the paper. Departures: the code clamps probabilities to 1e-5
    ... 0.996 before the KL, and its projector begins with a norm of its own, where this module has the
    student's final norm.
    """

    def __init__(
        self,
        teacher: VisionTransformer | Eva,
        student: VisionTransformer | Eva,
        *,
        temperature: float = 10.0,
        attention_weight: float = 0.1,
        hidden_width: int | None = None,
        projector_layers: int = 4,
        merge: Callable[[Tensor], Tensor] | None = None,
        compare: Callable[[Tensor, Tensor], Tensor] = row_divergence,
        by_value: bool = False,
        resample: bool = False,
        drop_prefix: bool = False,
        normalisation: Normalisation | None = None,
    ):
        check_timm(teacher)
        check_timm(student)
        for role, vit in (("teacher", teacher), ("student", student)):
            if vit.cls_token is None:
                raise ValueError(f"the {role} has no class token")
            if forbids_pairs(vit.blocks[-1:]):
                raise ValueError(f"the {role}'s attention hides the class token from itself")
        grids = [tuple(vit.patch_embed.grid_size) for vit in (teacher, student)]
        if grids[0] != grids[1] and not resample:
            raise ValueError(f"patch grids {grids[0]} and {grids[1]}: resample=True?")
        prefixes = [vit.num_prefix_tokens for vit in (teacher, student)]
        if prefixes[0] != prefixes[1] and not drop_prefix:
            raise ValueError(f"{prefixes[0]} and {prefixes[1]} prefix tokens: drop_prefix=True?")
        super().__init__(student, teacher, normalisation=normalisation)
        self.temperature, self.attention_weight, self.merge = temperature, attention_weight, merge
        self.compare, self.by_value = compare, by_value
        # Registers and distillation tokens are no match for each other: where their number differs, only the
        # class token is common.
        prefix = student.num_prefix_tokens
        self.prefix_tokens = prefix if teacher.num_prefix_tokens == prefix else 1
        hidden_width = 2 * student.embed_dim if hidden_width is None else hidden_width
        self.projector = projector(student.embed_dim, hidden_width, teacher.embed_dim, projector_layers)

    def transferred(self, images: Tensor) -> Transferred:
        """Student logits (B, classes) and alignment + attention_weight · divergence, a scalar."""
        logits, alignment, divergence = self.losses(images)
        return Transferred(logits, alignment + self.attention_weight * divergence)

    def losses(self, images: Tensor) -> Losses:
        """Logits and both losses for images (B, 3, height, width), in training and in eval mode. Runs the
        teacher."""
        token_t, p_t = self.teacher_targets(images)
        seen = walk(self.student, images)
        projected = self.projector(self.student.norm(seen.tokens[:, 0]))  # (B, the teacher's width)
        scores = self._class_scores(self.student, seen.layers[-1])
        if self.merge is None:  # what aggregate_heads makes, as a logarithm
            log_p_s = (scores.sum((1, 2)) / self.temperature).log_softmax(-1)
        else:
            p_s = self.merge(scores.softmax(-1))[:, 0, 0]
            log_p_s = p_s.clamp(min=torch.finfo(p_s.dtype).tiny).log()
        alignment = nn.functional.mse_loss(projected.to(token_t.dtype), token_t)  # float32 beside bf16
        return Losses(seen.logits, alignment, self.compare(log_p_s, p_t))

    def teacher_targets(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """The teacher's final class token (B, its width) and its merged class attention (B, the student's
        tokens), as constants."""
        with self.frozen_teachers():
            seen = walk(self.teacher, self.for_teacher(images), head=False)
            token = self.teacher.norm(seen.tokens[:, 0])
            scores = self._class_scores(self.teacher, seen.layers[-1])
            grids = [tuple(vit.patch_embed.grid_size) for vit in (self.teacher, self.student)]
            if grids[0] != grids[1]:
                # (B, H, the student's tokens)
                p = resample_class_attention(scores.squeeze(2).softmax(-1), *grids, self.prefix_tokens)
                scores = p.clamp(min=FLOOR).log().unsqueeze(2)
            if self.merge is None:
                p = aggregate_heads(scores=scores, temperature=self.temperature)
            else:
                p = self.merge(scores.softmax(-1))
        # clones outlive inference mode, which autograd needs
        return (token.to(p.dtype).clone(), p[:, 0, 0].clone())

    def _class_scores(self, vit: VisionTransformer | Eva, seen: Seen) -> Tensor:
        """Attention logits of the class token for the tokens that both models have: (B, H, 1, N); by value
        with the logarithms of the values' lengths, which are weights after a softmax."""

        def common(x: Tensor) -> Tensor:
            if vit.num_prefix_tokens == self.prefix_tokens:
                return x
            return torch.cat([x[:, :, : self.prefix_tokens], x[:, :, vit.num_prefix_tokens :]], 2)

        k = common(seen.k)
        exact = torch.promote_types(k.dtype, torch.float32)  # bf16 would cost what the sum over heads adds up
        with torch.autocast(k.device.type, enabled=False):
            # token 0 is the class token; no other row is made
            scores = seen.scale * seen.q[:, :, :1].to(exact) @ k.to(exact).mT
            if self.by_value:
                lengths = common(seen.v).to(exact).norm(dim=-1)
                scores = scores + lengths.clamp(min=torch.finfo(exact).tiny).log().unsqueeze(2)
            return scores


def projector(width: int, hidden_width: int, teacher_width: int, layers: int = 4) -> nn.Sequential:
    """The MLP of 4 layers, or of another number, from the student's class token (B, width) to the teacher's
    (B, teacher_width). Its layers are in turn `hidden_width` and `width` wide, the last as the teacher.

    Source: the published code of arXiv 2210.00944, whose small normal first weights vanish in narrow
    students; here they are PyTorch's.
    """
    widths = [width, *([hidden_width, width] * layers)[: layers - 1], teacher_width]
    parts: list[nn.Module] = []
    for before, after in pairwise(widths):
        parts += [nn.Linear(before, after), nn.GELU()]
    return nn.Sequential(*parts[:-1], nn.LayerNorm(teacher_width, eps=1e-6))
