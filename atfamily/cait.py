"""CaiT: patches attend to patches with talking heads, then a class token alone asks the patches. Walk timm's
own, and transfer either part of its attention. Source: Touvron et al. 2021, "Going deeper with Image
Transformers" (arXiv 2103.17239), section 3; talking heads: Shazeer et al. 2020 (arXiv 2003.02436)."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from timm.models.cait import Cait, ClassAttn, LayerScaleBlock, LayerScaleBlockClassAttn, TalkingHeadAttn
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from atfamily.locality import forbids_pairs
from atlib._util import require_known
from atlib.attention import Seen, Unwalkable, attend, walk
from atlib.attention_transfer import Transferred
from atlib.baselines import Distillation
from atlib.losses import attention_cross_entropy, dense_attention_cross_entropy
from atlib.maps import join_heads
from atlib.pair import Normalisation
from atlib.plan import HOW, Plan
from atlib.vit import check_timm


class CaitWalk(NamedTuple):
    """The outcome of a walk. `logits`: (B, classes); `layers`: a `Seen` for each self-attention layer, q and
    k (B, H, N, H·d), v (B, H, N, d), N patches; `class_layers`: one for each class-attention layer, q (B, H,
    1, d), k and v (B, H, N + 1, d), so that its `map` is the class row (B, H, 1, N + 1)."""

    logits: Tensor
    layers: tuple[Seen, ...]
    class_layers: tuple[Seen, ...]


def walk_cait(
    cait: Cait,
    images: Tensor,
    *,
    replace: Mapping[int, Seen] | None = None,
    replace_class: Mapping[int, Seen] | None = None,
) -> CaitWalk:
    """Compute what `cait(images)` computes, and return what every attention layer saw on the way.

    `images`: (B, 3, height, width). A self-attention layer's map is the softmax between its two mixings of
    heads: after the second one rows no longer sum to 1 and may be negative, so there is no map to show. As q
    and k it has one wide head for each mixed head (`talking_heads`). `replace` and `replace_class` map the
    index of a self-attention or class-attention layer to what stands in place of its q and k: of a `Seen`, q,
    k and scale count (or its given map); values stay the layer's own.
    """
    check_cait(cait)
    replace, replace_class = replace or {}, replace_class or {}
    for given, blocks in ((replace, cait.blocks), (replace_class, cait.blocks_token_only)):
        if beyond := given.keys() - range(len(blocks)):
            raise ValueError(f"attention in place of layer {min(beyond)}, of {len(blocks)} layers")
    patches = cait.pos_drop(cait.patch_embed(images) + cait.pos_embed)
    layers, class_layers = [], []
    for index, block in enumerate(cait.blocks):
        if cait.grad_checkpointing and torch.is_grad_enabled():
            patches, seen = checkpoint(_step, block, patches, replace.get(index), use_reentrant=False)
        else:
            patches, seen = _step(block, patches, replace.get(index))
        layers.append(seen)
    token = cait.cls_token.expand(len(images), -1, -1)
    for index, block in enumerate(cait.blocks_token_only):
        token, seen = _class_step(block, token, patches, replace_class.get(index))
        class_layers.append(seen)
    logits = cait.forward_head(cait.norm(torch.cat([token, patches], 1)))
    return CaitWalk(logits, tuple(layers), tuple(class_layers))


def talking_heads(q: Tensor, k: Tensor, mixing: Tensor) -> tuple[Tensor, Tensor]:
    """Heads mixed before the softmax, as one wide head for each: q and k (B, H, N, d) to (B, H, N, H·d).

    mixing: L (H, H). Σ_g L(h, g) q_g · k_g is the dot product of concat_g(L(h, g) q_g), which is head h's new
    q, with concat_g(k_g), which all heads share. A bias of the mixing adds a constant to each row of logits,
    which softmax ignores. The identity is this project's.
    """
    wide = torch.einsum("hg,bgnd->bhngd", mixing, q).flatten(3)
    return wide, join_heads(k).expand(-1, len(mixing), -1, -1)


def _step(block: LayerScaleBlock, patches: Tensor, instead: Seen | None) -> tuple[Tensor, Seen]:
    """One block of talking heads: timm's `LayerScaleBlock.forward` with the inside visible."""
    attn, x = block.attn, block.norm1(patches)
    q, k, v = attn.qkv(x).unflatten(-1, (3, attn.num_heads, -1)).permute(2, 0, 3, 1, 4)
    if instead is None:
        seen = Seen(*talking_heads(q, k, attn.proj_l.weight), v, attn.scale)
    else:
        seen = instead._replace(v=v)
    # the second mixing makes of maps what are none any more
    shares = attn.proj_w(seen.map.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    mixed = (attn.attn_drop(shares) @ v).transpose(1, 2).flatten(2)  # (B, N, H·d)
    patches = patches + block.drop_path(block.gamma_1 * attn.proj_drop(attn.proj(mixed)))
    return patches + block.drop_path(block.gamma_2 * block.mlp(block.norm2(patches))), seen


def _class_step(
    block: LayerScaleBlockClassAttn, token: Tensor, patches: Tensor, instead: Seen | None
) -> tuple[Tensor, Seen]:
    """One block of class attention, in which only the class token (B, 1, D) asks and only it is changed:
    timm's `LayerScaleBlockClassAttn.forward`."""
    attn, x = block.attn, block.norm1(torch.cat([token, patches], 1))

    def heads(projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (attn.num_heads, -1)).transpose(1, 2)

    v = heads(attn.v(x))
    if instead is None:
        seen = Seen(heads(attn.q(x[:, :1])), heads(attn.k(x)), v, attn.scale)
    else:
        seen = instead._replace(v=v)
    dropout = attn.attn_drop.p if attn.training else 0.0
    mixed = attend(seen, dropout, attn.fused_attn).transpose(1, 2).flatten(2)  # (B, 1, H·d)
    token = token + block.drop_path(block.gamma_1 * attn.proj_drop(attn.proj(mixed)))
    return token + block.drop_path(block.gamma_2 * block.mlp(block.norm2(token))), seen


# --- Which models can be walked ---


def check_cait(cait: nn.Module) -> None:
    """Raise `Unwalkable`, naming the class, unless `walk_cait(cait, x)` computes exactly what `cait(x)`
    computes: timm's `Cait` of timm's own blocks."""
    if type(cait) is not Cait:
        raise Unwalkable(f"a {type(cait).__name__} is not timm's Cait")
    kinds = {(LayerScaleBlock, TalkingHeadAttn), (LayerScaleBlockClassAttn, ClassAttn)}
    for block in (*cait.blocks, *cait.blocks_token_only):
        if (type(block), type(block.attn)) not in kinds:
            raise Unwalkable(f"a {type(block).__name__} of {type(block.attn).__name__} is not timm's")


# --- Transfer ---


class CaitTransfer(Distillation):
    """A CaiT that takes from a ViT where patches look at each other, where the class token looks, or both.

    `patches` and `class_rows`: "copy", "distill", or None for neither. For patches the teacher's map is taken
    among patches alone: the class token is dropped and rows are renormalised. For class rows it is the class
    token's row over itself and the patches, AttnDistill's target (arXiv 2210.00944), but head by head.
    Registers of a teacher are dropped.

    `layers`: {self-attention layer of the student: layer of the teacher}; None pairs equal depths.
    `class_layers`: {class-attention layer: layer of the teacher}; None pairs them with the teacher's last.

    The transfer loss is the sum of the parts that are distilled: `attention_cross_entropy` of the patches
    (mean over batch, heads and queries, summed over layers), and the same of the class rows. What is copied
    has no loss; its q, k and first mixing get no gradient. With a copied part the teacher is needed at
    inference.
    """

    not_walkable = "walk its .teacher, or its .student with atfamily.cait.walk_cait"

    def __init__(
        self,
        teacher: VisionTransformer | Eva,
        student: Cait,
        *,
        patches: str | None = None,
        class_rows: str | None = None,
        layers: Mapping[int, int] | None = None,
        class_layers: Mapping[int, int] | None = None,
        normalisation: Normalisation | None = None,
    ):
        check_timm(teacher)
        check_cait(student)
        for name, how in (("patches", patches), ("class_rows", class_rows)):
            if how is not None:
                require_known(name, how, HOW)
        if patches is None and class_rows is None:
            raise ValueError("patches= and class_rows= are None: nothing is transferred")
        if (patches is None and layers is not None) or (class_rows is None and class_layers is not None):
            raise ValueError("layers are paired of a part that is None")
        if forbids_pairs(teacher.blocks):
            raise ValueError("the teacher's attention forbids pairs of tokens")
        if class_rows is not None and teacher.cls_token is None:
            raise ValueError("the teacher has no class token")
        sizes = [(x.blocks[0].attn.num_heads, tuple(x.patch_embed.grid_size)) for x in (teacher, student)]
        if sizes[0] != sizes[1]:
            raise ValueError(f"(heads, patch grid): teacher {sizes[0]}, student {sizes[1]}")
        depths = [len(part) for part in (student.blocks, student.blocks_token_only, teacher.blocks)]
        if patches is not None and layers is None and depths[0] != depths[2]:
            raise ValueError(f"depths {depths[2]} and {depths[0]}: layers={{student's: teacher's}}")
        pairs: dict[int, int] = {}
        class_pairs: dict[int, int] = {}
        if patches is not None:
            pairs = dict(Plan(layers=layers).pairs_of(depths[0], depths[2]))
        if class_rows is not None:
            last = {layer: depths[2] - depths[1] + layer for layer in range(depths[1])}
            class_layers = last if class_layers is None else class_layers
            class_pairs = dict(Plan(layers=class_layers).pairs_of(depths[1], depths[2]))
        super().__init__(student, teacher, normalisation=normalisation)
        self.patches, self.class_rows = patches, class_rows
        self.layers, self.class_layers = pairs, class_pairs

    @property
    def needs_teacher(self) -> bool:
        """Whether a part is copied, so that the student works at inference only together with the teacher."""
        return "copy" in (self.patches, self.class_rows)

    def forward(self, images: Tensor) -> Transferred:
        """Student logits (B, classes) and the unweighted transfer loss for images (B, 3, height, width)."""
        if self.needs_teacher:
            return self.transferred(images)
        return super().forward(images)

    def transferred(self, images: Tensor) -> Transferred:
        """Logits and loss, with the teacher's attention in place of what is copied."""
        target, class_target = self.teacher_layers(images)
        seen = walk_cait(
            self.student,
            images,
            replace=target if self.patches == "copy" else None,
            replace_class=class_target if self.class_rows == "copy" else None,
        )
        loss = seen.logits.new_zeros(())
        if self.patches == "distill":
            loss = loss + attention_cross_entropy([seen.layers[i] for i in target], list(target.values()))
        if self.class_rows == "distill":  # one row a head: written out it is small
            student_rows = [seen.class_layers[i] for i in class_target]
            loss = loss + dense_attention_cross_entropy(student_rows, list(class_target.values()))
        return Transferred(seen.logits, loss)

    def teacher_layers(self, images: Tensor) -> tuple[dict[int, Seen], dict[int, Seen]]:
        """What the teacher's layers saw, as constants, by the student's self-attention and class-attention
        layers: q and k of the patches; q of the class token, and k of it and the patches."""
        last = max([*self.layers.values(), *self.class_layers.values()])
        with self.frozen_teachers():
            seen = walk(self.teacher, self.for_teacher(images), stop_after=last).layers
        n = self.teacher.num_prefix_tokens

        def among(layer: int, queries: list[int] | slice, keys: list[int] | slice) -> Seen:
            # clones outlive inference mode, which autograd needs
            q, k = seen[layer].q[:, :, queries].clone(), seen[layer].k[:, :, keys].clone()
            return Seen(q, k, None, seen[layer].scale)

        patches = slice(n, None)
        class_and_patches = [0, *range(n, seen[last].q.shape[2])]
        of_patches = {s: among(t, patches, patches) for s, t in self.layers.items()}
        return of_patches, {s: among(t, [0], class_and_patches) for s, t in self.class_layers.items()}
