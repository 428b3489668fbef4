"""Teacher and student as one module: what the plan takes from the teacher, copied or distilled."""

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from atlib.attention import MaskedAttention, Own, forbid
from atlib.compatibility import pair_up
from atlib.losses import attention_cross_entropy, map_cross_entropy, projection_mse
from atlib.maps import average_over, join_heads, keep_own, mean_heads, place_tokens, resample
from atlib.plan import Plan
from atlib.walking import DropPathMasks, Instead, Seen, Walk, check_walkable, sample_drop_path, walk

TEMPERATURE = 10.0  # of the aggregation of heads: AttnDistill (arXiv 2210.00944)


class Transferred(NamedTuple):
    """What the pair computes. `logits`: (B, classes), the student's; `transfer_loss`: scalar, unweighted, 0
    for Copy."""

    logits: Tensor
    transfer_loss: Tensor


@runtime_checkable
class Pair(Protocol):
    """A student with what it learns from: `AttentionTransfer`, and the methods that it is compared with.

    needs_teacher: whether the student works at inference only together with what taught it.
    """

    student: nn.Module

    @property
    def needs_teacher(self) -> bool: ...


def student_of(model: nn.Module) -> nn.Module:
    """What is trained to classify: the student of a pair; any other model is its own."""
    return model.student if isinstance(model, Pair) else model


class AttentionTransfer(nn.Module):
    """A student that learns everything from scratch except what `plan` takes from the teacher.

    Only the student is part of the module (with a learned head mapping, where the plan asks for one):
    `parameters()`, `state_dict()`, `train()` and DDP never see the teacher. The teacher passed in is frozen
    in place (eval mode, no gradients), moves with `.to(...)`, and is run no further than the last transferred
    layer's q and k (v, where v is transferred). Copy needs the teacher at inference too; after Distill,
    `.student` alone is the result, and the pair holds none of the teacher's blocks after the last that is
    run: whoever passed the teacher in still has all of it, and lets go of the rest by letting go of the
    teacher.

    `path` says what happens to maps: "map-free" (none is ever stored) or "dense" (averaged, resampled or
    learned maps, maps of which some rows or columns are the student's own, and some copied heads among
    narrower or wider ones, are written out). `mismatched` names the
    teacher's native components that the student lacks, {name: (teacher's, student's)}.

    Raises `ValueError` when the two cannot be paired, naming all that differs, and `Unwalkable` for models
    `walk` refuses.
    """

    def __init__(self, teacher: VisionTransformer | Eva, student: VisionTransformer | Eva, plan: Plan):
        super().__init__()
        check_walkable(teacher)
        check_walkable(student)
        self.plan = plan
        self.pairing = pair_up(teacher, student, plan)
        self.layers = tuple(of_student for of_student, _ in self.pairing.layers)
        self.student = student
        one_to_one = all(of_student == of_teacher for of_student, of_teacher in self.pairing.layers)
        self._same_masks = one_to_one and len(teacher.blocks) == len(student.blocks)
        teacher.eval().requires_grad_(False)
        if not self.needs_teacher:  # a teacher that is needed later is saved too, and must be whole
            teacher = _first_blocks(teacher, 1 + max(of_teacher for _, of_teacher in self.pairing.layers))
        # A tuple keeps the teacher out of nn.Module's registration: it is an input of the method, not a part
        # of the student.
        self._teacher = (teacher,)
        # Heads of another width cannot stand among the student's own as q and k, only as maps.
        mixes_widths = (
            plan.what == "map"
            and plan.how == "copy"
            and plan.heads is not None
            and self.pairing.widths_differ
        )
        # Nor can some heads look where others must not, but as maps.
        mixes_masks = (
            plan.what == "map"
            and plan.how == "copy"
            and plan.heads is not None
            and any(isinstance(block.attn, MaskedAttention) for block in teacher.blocks)
        )
        writes_maps = (
            plan.average is not None
            or mixes_widths
            or self._own is not None
            or mixes_masks
            or self._heads_by("average")
            or self._heads_by("learn")
        )
        self.path = (
            "dense" if writes_maps or self.pairing.teacher_grid != self.pairing.student_grid else "map-free"
        )
        self.head_mapping = None
        if self._heads_by("learn"):  # M of each layer starts as the mean over the student's heads
            shape = teacher.blocks[0].attn.num_heads, student.blocks[0].attn.num_heads
            self.head_mapping = nn.ParameterList(torch.full(shape, 1 / shape[1]) for _ in self.layers)

    @property
    def teacher(self) -> VisionTransformer | Eva:
        """The frozen teacher; for Distill without its blocks after the last transferred layer."""
        return self._teacher[0]

    @property
    def needs_teacher(self) -> bool:
        """Whether the student works at inference only together with the teacher: True for Copy, False for
        Distill."""
        return self.plan.how == "copy"

    @property
    def mismatched(self) -> dict[str, tuple]:
        """Components in which the student is not built like its teacher: {name: (teacher's, student's)}."""
        return self.pairing.components

    def forward(self, images: Tensor) -> Transferred:
        """Student logits (B, classes) and the unweighted transfer loss for images (B, 3, height, width), or
        for pairs (B, 2, 3, height, width) of what the student and what the teacher sees
        (`atlib.data.pair`)."""
        seen, transfer_loss = self.walk_with_loss(images)
        return Transferred(seen.logits, transfer_loss)

    def walk_with_loss(self, images: Tensor) -> tuple[Walk, Tensor]:
        """The walk that `forward` takes its logits from, and the transfer loss, a scalar: for what reads more
        of the student than its logits. Runs the teacher."""
        images, teacher_images = _apart(images)
        masks = self._masks(images)
        target = _one_by_one(self.teacher_layers(teacher_images, masks))
        seen = self._walked(images, target, masks)
        if self.plan.how == "copy":
            return seen, seen.logits.new_zeros(())
        tokens = None if self.pairing.own_keys else self.pairing.student_tokens
        own = [_on_tokens(seen.layers[layer], tokens) for layer in self.layers]
        return seen, self._distilled(own, target)

    def walk(self, images: Tensor) -> Walk:
        """What happens inside the student for images, or pairs of them: the walk that `forward` takes its
        logits from.

        Where the plan copies, the student's layers are seen with the teacher's attention in them; where it
        distills, the teacher is not run.
        """
        images, teacher_images = _apart(images)
        masks = self._masks(images)
        target = self.teacher_layers(teacher_images, masks) if self.needs_teacher else []
        return self._walked(images, target, masks)

    def _masks(self, images: Tensor) -> list[DropPathMasks] | None:
        """The stochastic-depth masks that teacher and student share; None where they do not."""
        return sample_drop_path(self.student, images) if self.training and self.plan.share_drop_path else None

    def _walked(self, images: Tensor, target: Iterable[Seen], masks: list[DropPathMasks] | None) -> Walk:
        """The student's walk, with what the teacher saw in place of its own where the plan copies."""
        return walk(
            self.student,
            images,
            replace=self._copied(target) if self.needs_teacher else None,
            drop_path=masks,
            checked=True,
        )

    def teacher_layers(self, images: Tensor, drop_path=None) -> list[Seen]:
        """What the teacher's transferred layers saw on these images, on the tokens that both have, as
        constants.

        Each holds only what the plan needs of q, k, v; the rest is None.
        """
        self.teacher.eval()  # whoever holds the teacher may have called .train() on it since
        layers = [of_teacher for _, of_teacher in self.pairing.layers]
        needed = "qk" if self.plan.what == "map" else self.plan.what
        shared = drop_path[: len(self.teacher.blocks)] if drop_path and self._same_masks else None
        with without_history():
            seen = walk(
                self.teacher,
                images,
                stop_after=max(layers),
                values=needed == "v",
                drop_path=shared,
                checked=True,
            ).layers
        # Copies outlive inference mode, which autograd needs, and let go of the rest of the joint projection,
        # which memory needs.
        kept = [
            Seen(
                *(getattr(seen[i], name).clone() if name in needed else None for name in "qkv"),
                seen[i].scale,
                bias=seen[i].bias.clone() if self.plan.what == "map" and seen[i].bias is not None else None,
            )
            for i in layers
        ]
        return [_on_tokens(each, self.pairing.teacher_tokens) for each in kept]

    def teacher_maps(self, target: Iterable[Seen]) -> list[Tensor]:
        """The teacher's maps as the plan wants them, one (B, H, N, N) per layer: on the student's patch grid,
        averaged, with zeros for tokens that only the student has."""
        maps = [
            resample(
                seen.map, self.pairing.teacher_grid, self.pairing.student_grid, self.pairing.common_prefix
            )
            for seen in target
        ]
        if self.plan.average is not None:
            maps = average_over(maps, self.plan.average)
        if self.pairing.own_keys:
            maps = [place_tokens(p, self.pairing.student_tokens, self._tokens) for p in maps]
        return [mean_heads(p) for p in maps] if self._heads_by("average") else maps

    @property
    def _tokens(self) -> int:
        """How many tokens the transferred maps have."""
        down, across = self.pairing.student_grid
        return self.pairing.common_prefix + len(self.pairing.own_keys) + down * across

    @property
    def _own(self) -> Own | None:
        """What of a transferred map is the student's own; None for nothing."""
        pairing = self.pairing
        if pairing.queries is None:
            return None
        own_queries = set(range(self._tokens)) - set(pairing.queries)
        return Own(tuple(sorted(own_queries)), pairing.own_keys)

    def _heads_by(self, remedy: str) -> bool:
        """Whether heads differ in number and the plan answers with this remedy."""
        return self.pairing.heads_differ and self.plan.unequal_heads == remedy

    def _aggregated(self, seen: Seen) -> Seen:
        """A layer with its heads merged into one where the plan asks for it; as q and k, so that no map is
        needed."""
        if not self._heads_by("aggregate"):
            return seen
        q, k = join_heads(seen.q), join_heads(seen.k)
        return Seen(q, k, None, seen.scale / TEMPERATURE, bias=seen.bias)

    def _copied(self, target: Iterable[Seen]) -> dict[int, Instead]:
        """What each of the student's layers uses instead of its own; one merged head serves all of the
        student's."""
        target = [self._aggregated(seen) for seen in target]
        H = self.student.blocks[0].attn.num_heads
        maps = self.teacher_maps(target) if self.path == "dense" else [None] * len(target)
        replace = {}
        for layer, seen, p in zip(self.layers, target, maps):
            heads = self.plan.heads_of(layer, H)
            q, k, v, p = (
                _spread(x, H, heads)
                for x in ((seen.q, seen.k, seen.v, None) if p is None else (None, None, None, p))
            )
            scale = None if q is None or k is None else seen.scale
            bias = seen.bias if p is None else None
            replace[layer] = Instead(q, k, v, p, scale, heads, self._own, bias)
        return replace

    def _distilled(self, own: Sequence[Seen], target: Iterable[Seen]) -> Tensor:
        """The unweighted transfer loss between the student's layers and the teacher's, which are asked for
        one at a time."""
        H = self.student.blocks[0].attn.num_heads
        heads = [self.plan.heads_of(layer, H) for layer in self.layers]
        own = [_select(self._aggregated(seen), chosen) for seen, chosen in zip(own, heads)]
        target = (self._aggregated(seen) for seen in target)
        if self.path == "dense":  # before heads are chosen: an average is over all of them
            maps = self.teacher_maps(target)
            return self._distilled_maps(
                own, [p if chosen is None else p[:, chosen] for p, chosen in zip(maps, heads)]
            )
        target = (_select(seen, chosen) for seen, chosen in zip(target, heads))
        if self.plan.what != "map":
            return sum(projection_mse([mine], [theirs], self.plan.what) for mine, theirs in zip(own, target))
        # The gradients of a layer, made at once, take the room of the teacher's q and k, which are let go.
        return sum(attention_cross_entropy([mine], [theirs]) for mine, theirs in zip(own, target))

    def _distilled_maps(self, own: Sequence[Seen], maps: Sequence[Tensor]) -> Tensor:
        """The loss where the teacher's maps are written out; what the student's layers forbid goes."""
        maps = [forbid(p, seen.bias) for p, seen in zip(maps, own)]
        if self.head_mapping is not None:
            mapped = (torch.einsum("ts,bsij->btij", M, seen.map) for M, seen in zip(self.head_mapping, own))
            return sum(nn.functional.mse_loss(guess, p) for guess, p in zip(mapped, maps))
        log_maps = [seen.scores.log_softmax(-1) for seen in own]
        if self._own is not None:
            maps = [keep_own(p, log_p.detach().exp(), *self._own) for p, log_p in zip(maps, log_maps)]
            rows = list(self.pairing.queries)
            log_maps, maps = ([each[:, :, rows] for each in both] for both in (log_maps, maps))
        if self._heads_by("average"):  # the log of the mean over heads, where a single p may underflow
            log_maps = [log_p.logsumexp(1, keepdim=True) - math.log(log_p.shape[1]) for log_p in log_maps]
        return sum(map_cross_entropy(log_p, p) for log_p, p in zip(log_maps, maps))

    def _apply(self, fn, recurse=True):
        # .to(device), .double(), .cuda() reach the teacher although it is not registered
        self.teacher._apply(fn, recurse)
        return super()._apply(fn, recurse)


def without_history():
    """Inference mode for a teacher's run; under `torch.compile`, which cannot trace that on parameters, only
    no gradients."""
    return torch.no_grad() if torch.compiler.is_compiling() else torch.inference_mode()


def _apart(images: Tensor) -> tuple[Tensor, Tensor]:
    """What the student sees and what the teacher sees, each (B, 3, height, width): the same, where images do
    not come in pairs."""
    return (images[:, 0], images[:, 1]) if images.ndim == 5 else (images, images)


def _first_blocks(vit: VisionTransformer | Eva, number: int) -> VisionTransformer | Eva:
    """The ViT without its blocks after the first `number`; both share everything else, and `vit` stays as it
    is."""
    if number == len(vit.blocks):
        return vit
    part = copy.copy(vit)
    part._modules = {**vit._modules, "blocks": vit.blocks[:number]}
    return part


def _one_by_one(layers: list[Seen]) -> Iterator[Seen]:
    """The layers in their order, each let go of when it is handed out, where the caller keeps no list."""
    waiting = layers[::-1]
    del layers
    while waiting:
        yield waiting.pop()


def _on_tokens(seen: Seen, tokens: Sequence[int] | None) -> Seen:
    """What a layer saw among some tokens only; softmax over fewer keys is the map with its rows
    renormalised."""
    if tokens is None:
        return seen
    return seen._replace(
        **{name: x[:, :, tokens] for name in "qkv" if (x := getattr(seen, name)) is not None},
        bias=None if seen.bias is None else seen.bias[tokens][:, tokens],
    )


def _select(seen: Seen, heads: Sequence[int] | None) -> Seen:
    """What some heads of a layer saw; all for None."""
    if heads is None:
        return seen
    return seen._replace(**{name: x[:, heads] for name in "qkv" if (x := getattr(seen, name)) is not None})


def _spread(x: Tensor | None, H: int, heads: Sequence[int] | None) -> Tensor | None:
    """What goes to the student's heads: a single head to all H of them, otherwise the chosen ones (all for
    None)."""
    if x is None:
        return None
    x = x.expand(-1, H, -1, -1) if x.shape[1] == 1 else x
    return x if heads is None else x[:, heads]
