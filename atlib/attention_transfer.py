"""Teacher and student as one module: what the plan takes from the teacher, copied or distilled."""

import gc
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from atlib.attention import (
    DropPathMasks,
    Instead,
    Kept,
    Seen,
    Unwalkable,
    Walk,
    forbid,
    outputs,
    sample_drop_path,
    walk,
)
from atlib.compatibility import Pairing, Sizes, examine, pair_up
from atlib.losses import attention_cross_entropy, map_cross_entropy, note, projection_mse
from atlib.maps import average_over, join_heads, keep_own, keep_tokens, mean_heads, place_tokens, resample
from atlib.pair import Normalisation, Pair, check_images
from atlib.plan import Plan

TEMPERATURE = 10.0  # of the aggregation of heads: AttnDistill (arXiv 2210.00944)
# What the teacher would be given, (B, 3, height, width) -> {its layer: its maps, (B, H, N, N)}
TeacherMaps = Callable[[Tensor], Mapping[int, Tensor]]


class Transferred(NamedTuple):
    """What the pair computes."""

    #: The student's, (B, classes).
    logits: Tensor
    #: A scalar, unweighted; 0 for Copy, nan where Distill is evaluated.
    transfer_loss: Tensor


class AttentionTransfer(Pair):
    """A student that learns everything from scratch except what `plan` takes from the teacher.

    Both are models that `walk` sees, of the same library or not. Each is run on one image of noise when the
    pair is built, which shows what must fit.

    Only the student is part of the module (with a learned head mapping, where the plan asks for one):
    `parameters()`, `state_dict()`, `train()` and DDP never see the teacher. The teacher is the caller's and
    stays as it is: it is run in eval mode, without gradients, no further than the last transferred layer's q
    and k (v, where v is transferred), and moves with `.to(...)`. Copy needs the teacher at inference
    too; after Distill, `.student` alone is the result, and evaluation (eval mode, no gradients) runs nothing
    else: `transfer_loss` is then nan, and `walk_with_loss` computes it all the same.

    `maps` takes the place of running the teacher, such as maps that were stored (`atlib.MapCache`): it
    is given what the teacher would be given. The teacher is still what the student is paired with.

    normalisation: of the images that the pair is given (`atlib.pair.Pair`). Raises `ValueError` when the two
    cannot be paired, naming all that differs, and for a plan that maps alone do not serve, and `Unwalkable`
    for models `walk` refuses.
    """

    def __init__(
        self,
        teacher: nn.Module,
        student: nn.Module,
        plan: Plan,
        maps: TeacherMaps | None = None,
        *,
        normalisation: Normalisation | None = None,
    ):
        if not isinstance(plan, Plan):
            raise ValueError(f"plan={plan!r}: give a Plan, such as Plan(how='copy')")
        for model in (teacher, student):
            if (reason := getattr(model, "not_walkable", None)) is not None:
                raise Unwalkable(f"cannot walk a {type(model).__name__}: {reason}")
        of_teacher, projections_of_teacher = examine(teacher, student)
        of_student, projections = examine(student, teacher)
        pairing = pair_up(teacher, student, plan, (of_teacher, of_student))
        if maps is not None:
            _check_served_by_maps(plan, pairing, student)
        super().__init__(student, teacher, normalisation=normalisation)
        if (
            of_teacher.image != of_student.image
        ):  # also for models that do not say which images alone they take
            self._views = (self._views[0]._replace(size=of_teacher.image),)
        self.plan = plan
        self.pairing = pairing
        self._maps = maps
        self._built_with = (student,)  # of which the projections are
        self._looked = False  # whether a DDP was looked for that holds the student, at the first step
        self.layers = tuple(layer for layer, _ in pairing.layers)
        one_to_one = all(layer == layer_of_teacher for layer, layer_of_teacher in pairing.layers)
        self._same_masks = one_to_one and of_teacher.depth == of_student.depth
        self._projections, self._projections_of_teacher = projections, projections_of_teacher
        self._sees_images = of_student.image is not None
        self._form = _form_of(plan, pairing, of_teacher, of_student, given=maps is not None)
        self.head_mapping = self._form.head_mapping  # registered here: the form is no module

    @property
    def path(self) -> str:
        """What happens to maps: "map-free" (none is ever stored) or "dense" (averaged, resampled or learned
        maps, maps of which some rows or columns are the student's own, and some copied heads among narrower
        or wider ones, are written out)."""
        return self._form.path

    def extra_repr(self) -> str:
        """The teacher, which is no part of the module, and the plan."""
        return f"teacher={type(self.teacher).__name__}, {self.plan}"

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
        (`atlib.data.pair`). In evaluation, which is eval mode without gradients, a distilling pair
        answers without its teacher, and its loss, not computed, is nan."""
        if not (self.training or self.needs_teacher or torch.is_grad_enabled()):
            images, _ = self._apart(images)
            logits = outputs(self.student, images)
            return Transferred(logits, logits.new_full((), math.nan))
        seen, transfer_loss = self.walk_with_loss(images)
        return Transferred(seen.logits, transfer_loss)

    def walk_with_loss(self, images: Tensor) -> tuple[Walk, Tensor]:
        """The walk that `forward` takes its logits from, and the transfer loss, a scalar: for what reads more
        of the student than its logits. Runs the teacher."""
        images, teacher_images = self._apart(images)
        masks = self._masks(images)
        teacher_layers = _one_by_one(self.teacher_layers(teacher_images, masks))
        seen = self._student_walk(images, teacher_layers, masks)
        if self.plan.how == "copy":
            return seen, seen.logits.new_zeros(())
        tokens = None if self.pairing.own_keys else self.pairing.student_tokens
        student_layers = [_on_tokens(seen.layers[layer], tokens) for layer in self.layers]
        losses = zip(self.layers, self._form.losses(student_layers, teacher_layers))
        return seen, sum(note(f"transfer_loss/layer_{layer}", loss) for layer, loss in losses)

    def walk(self, images: Tensor) -> Walk:
        """What happens inside the student for images, or pairs of them: the walk that `forward` takes its
        logits from.

        Where the plan copies, the student's layers are seen with the teacher's attention in them; where it
        distills, the teacher is not run.
        """
        images, teacher_images = self._apart(images)
        masks = self._masks(images)
        teacher_layers = self.teacher_layers(teacher_images, masks) if self.needs_teacher else []
        return self._student_walk(images, teacher_layers, masks)

    def _apart(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """What the student sees and what the teacher sees, each (B, 3, height, width): the same, where images
        do not come in pairs."""
        if not self._sees_images:  # texts, clips
            return images, images
        if images.ndim == 5 and images.shape[1] != 2:
            raise ValueError(f"images {tuple(images.shape)}: pairs are (B, 2, channels, height, width)")
        of_both = (images[:, 0], images[:, 1]) if images.ndim == 5 else (images, images)
        check_images(self.student, of_both[0])
        return of_both

    def _masks(self, images: Tensor) -> list[DropPathMasks] | None:
        """The stochastic-depth masks that teacher and student share; None where they do not."""
        shares = self.training and self.plan.share_drop_path
        return (sample_drop_path(self.student, images) or None) if shares and drops(self.student) else None

    def _student_walk(
        self, images: Tensor, teacher_layers: Iterable[Seen], masks: list[DropPathMasks] | None
    ) -> Walk:
        """The student's walk, with what the teacher saw in place of its own where the plan copies."""
        self._check_student()
        replace = None
        if self.plan.how == "copy":
            replace = dict(zip(self.layers, self._form.instead(teacher_layers)))
        return walk(self.student, images, replace=replace, drop_path=masks, projections=self._projections)

    def _check_student(self) -> None:
        if self.student is not self._built_with[0]:
            raise ValueError("the pair's student was replaced after it was built: build another pair")
        trains = self.training and torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if trains and not self._looked:
            self._looked = _refuse_ddp_around(self.student)

    def teacher_layers(self, images: Tensor, drop_path=None) -> list[Seen]:
        """What the teacher's transferred layers saw on these images, on the tokens that both have, as
        constants. Images are those of the student: the teacher sees them as `for_teacher` makes them.

        Each holds only what the plan needs of q, k, v; the rest is None. Where `maps` stand in for the
        teacher, each holds a given map, and the teacher is not run.
        """
        if self._maps is not None:
            return self._given_layers(images)
        layers = [of_teacher for _, of_teacher in self.pairing.layers]
        shown = self.for_teacher(images)
        with self.frozen_teachers():
            seen = walk(
                self.teacher,
                shown,
                stop_after=max(layers),
                values="v" in self._form.parts,
                drop_path=drop_path if self._same_masks else None,
                projections=self._projections_of_teacher,
            ).layers
        kept = [_constant(seen[layer], self._form.parts) for layer in layers]
        if shown.dtype != images.dtype:  # of a teacher in half precision, in the student's
            kept = [
                Seen(*(x.to(images.dtype) if isinstance(x, Tensor) else x for x in layer)) for layer in kept
            ]
        return [_on_tokens(layer, self.pairing.teacher_tokens) for layer in kept]

    def _given_layers(self, images: Tensor) -> list[Seen]:
        maps = self._maps(self.for_teacher(images))
        layers = [of_teacher for _, of_teacher in self.pairing.layers]
        if missing := [layer for layer in layers if layer not in maps]:
            raise ValueError(f"maps= has layers {sorted(maps)}, the plan transfers layer {missing[0]} too")
        tokens = self.pairing.teacher_tokens
        if tokens is not None and (wrong := [m for m in layers if maps[m].shape[-1] != tokens[-1] + 1]):
            raise ValueError(f"maps= has {maps[wrong[0]].shape[-1]} tokens, and the teacher {tokens[-1] + 1}")
        kept = [maps[layer] if tokens is None else keep_tokens(maps[layer], tokens) for layer in layers]
        return [Seen(None, None, None, 1.0, given=p) for p in kept]

    def teacher_maps(self, teacher_layers: Iterable[Seen]) -> list[Tensor]:
        """The teacher's maps as the plan wants them, one (B, H, N, N) per layer: heads merged, on the
        student's patch grid, averaged, with zeros for tokens that only the student has. Raises `ValueError`
        where the plan transfers q, k or v alone."""
        if not isinstance(self._form, _MapFree):
            raise ValueError(f"this plan transfers {self.plan.what!r}, and no maps: use what='map'")
        return self._form.maps(teacher_layers)


class _Form(ABC):
    """The form in which what the teacher saw reaches the student: one class each, chosen once for a pair, by
    `_form_of`."""

    path = "map-free"  # or "dense", where maps are written out
    parts = "qk"  # what is kept of a teacher's layer
    head_mapping: nn.ParameterList | None = None  # what is learned beside the student

    def __init__(self, plan: Plan, pairing: Pairing, teacher_heads: int, student_heads: int):
        self.student_heads = student_heads
        # the transferred heads of each transferred layer, None for all
        self.heads = [plan.heads_of(layer, student_heads) for layer, _ in pairing.layers]

    @abstractmethod
    def instead(self, teacher_layers: Iterable[Seen]) -> list[Instead]:
        """What each of the student's layers uses instead of its own: Copy."""

    @abstractmethod
    def losses(self, student_layers: Sequence[Seen], teacher_layers: Iterable[Seen]) -> Iterator[Tensor]:
        """The unweighted transfer loss between each of the student's layers and the teacher's, whose sum is
        Distill's; the teacher's are asked for one at a time."""

    def _spread(self, x: Tensor, heads: Sequence[int] | None) -> Tensor:
        """What goes to the student's heads: a single head to all of them, otherwise the chosen ones (all for
        None)."""
        x = x.expand(-1, self.student_heads, -1, -1) if x.shape[1] == 1 else x
        return x if heads is None else x[:, heads]


class _OnePart(_Form):
    """q, k or v alone."""

    def __init__(self, plan: Plan, pairing: Pairing, teacher_heads: int, student_heads: int):
        super().__init__(plan, pairing, teacher_heads, student_heads)
        self.parts = plan.what

    def instead(self, teacher_layers: Iterable[Seen]) -> list[Instead]:
        spread = [
            self._spread(getattr(seen, self.parts), heads) for seen, heads in zip(teacher_layers, self.heads)
        ]
        return [Instead(**{self.parts: part}, heads=heads) for part, heads in zip(spread, self.heads)]

    def losses(self, student_layers: Sequence[Seen], teacher_layers: Iterable[Seen]) -> Iterator[Tensor]:
        for student_layer, teacher_layer, heads in zip(student_layers, teacher_layers, self.heads):
            yield projection_mse([_select(student_layer, heads)], [_select(teacher_layer, heads)], self.parts)


class _MapFree(_Form):
    """Maps as the q and k they are made of; none is ever written out."""

    def __init__(self, plan: Plan, pairing: Pairing, teacher_heads: int, student_heads: int):
        super().__init__(plan, pairing, teacher_heads, student_heads)
        self.merges_heads = pairing.heads_differ and plan.unequal_heads == "aggregate"

    def instead(self, teacher_layers: Iterable[Seen]) -> list[Instead]:
        return [self._instead(self._merged(seen), heads) for seen, heads in zip(teacher_layers, self.heads)]

    def _instead(self, seen: Seen, heads: Sequence[int] | None) -> Instead:
        q, k = self._spread(seen.q, heads), self._spread(seen.k, heads)
        bias = _of_heads(seen.bias, heads)
        return Instead(q, k, scale=seen.scale, heads=heads, bias=bias, mask=seen.mask)

    def losses(self, student_layers: Sequence[Seen], teacher_layers: Iterable[Seen]) -> Iterator[Tensor]:
        # The gradients of a layer, made at once, take the room of the teacher's q and k, which are let go.
        return (
            attention_cross_entropy(
                [self._chosen(student_layer, heads)], [self._chosen(teacher_layer, heads)]
            )
            for student_layer, teacher_layer, heads in zip(student_layers, teacher_layers, self.heads)
        )

    def maps(self, teacher_layers: Iterable[Seen]) -> list[Tensor]:
        """The teacher's maps as the plan wants them, one (B, H, N, N) per layer."""
        return [self._merged(seen).map for seen in teacher_layers]

    def _merged(self, seen: Seen) -> Seen:
        """A layer with its heads merged into one where the plan asks for it; as q and k, so that no map is
        needed."""
        if not self.merges_heads:
            return seen
        if seen.given is not None:
            if seen.given.shape[1] != 1:  # the logarithm of maps that were stored in float16 would be wrong
                raise ValueError("unequal_heads='aggregate' of maps=: give them through aggregate_heads")
            return seen
        bias = seen.bias
        if bias is not None:  # the sum over heads, as of their scores
            bias = (bias.sum(0) if bias.ndim == 3 else seen.q.shape[1] * bias) / TEMPERATURE
        scale = seen.scale / TEMPERATURE
        return Seen(join_heads(seen.q), join_heads(seen.k), None, scale, bias=bias, mask=seen.mask)

    def _chosen(self, seen: Seen, heads: Sequence[int] | None) -> Seen:
        return _select(self._merged(seen), heads)


class _WrittenOut(_MapFree):
    """Maps that are no longer the attention of some q and k: averaged or resampled ones, and those of which
    parts are the student's own."""

    path = "dense"

    def __init__(self, plan: Plan, pairing: Pairing, teacher_heads: int, student_heads: int):
        super().__init__(plan, pairing, teacher_heads, student_heads)
        self.average = plan.average
        self.grids = pairing.teacher_grid, pairing.student_grid
        self.common_prefix = pairing.common_prefix
        down, across = pairing.student_grid
        # how many tokens the transferred maps have, and which of them the teacher's map is about
        self.tokens = pairing.common_prefix + len(pairing.own_keys) + down * across
        self.placed = pairing.student_tokens if pairing.own_keys else None
        # which rows are transferred, None for all; and what of a transferred map is the student's own
        self.rows = None if pairing.queries is None else list(pairing.queries)
        self.kept = None
        if self.rows is not None:
            self.kept = Kept(tuple(sorted({*range(self.tokens)} - {*self.rows})), pairing.own_keys)

    def instead(self, teacher_layers: Iterable[Seen]) -> list[Instead]:
        return [
            Instead(map=self._spread(p, heads), heads=heads, kept=self.kept)
            for p, heads in zip(self.maps(teacher_layers), self.heads)
        ]

    def losses(self, student_layers: Sequence[Seen], teacher_layers: Iterable[Seen]) -> Iterator[Tensor]:
        chosen = [self._chosen(seen, heads) for seen, heads in zip(student_layers, self.heads)]
        # heads of the teacher are chosen last: an average is over all
        maps = zip(self.maps(teacher_layers), self.heads, chosen)
        # what the student's layers forbid goes
        return self._differences(
            chosen, [forbid(p if heads is None else p[:, heads], seen.mask) for p, heads, seen in maps]
        )

    def _differences(self, student_layers: Sequence[Seen], maps: Sequence[Tensor]) -> Iterator[Tensor]:
        """The loss between each of the student's layers and the map that it should have."""
        log_maps = self._log_maps(student_layers)
        if self.kept is not None:
            maps = [keep_own(p, log_p.detach().exp(), *self.kept) for p, log_p in zip(maps, log_maps)]
            log_maps, maps = ([p[:, :, self.rows] for p in both] for both in (log_maps, maps))
        return (map_cross_entropy(log_p, p) for log_p, p in zip(log_maps, maps))

    def _log_maps(self, student_layers: Sequence[Seen]) -> list[Tensor]:
        return [seen.scores.log_softmax(-1) for seen in student_layers]

    def maps(self, teacher_layers: Iterable[Seen]) -> list[Tensor]:
        maps = [resample(self._merged(seen).map, *self.grids, self.common_prefix) for seen in teacher_layers]
        if self.average is not None:
            maps = average_over(maps, self.average)
        if self.placed is not None:
            maps = [place_tokens(p, self.placed, self.tokens) for p in maps]
        return maps


class _MeanOfHeads(_WrittenOut):
    """The mean over the heads of maps, for unequal numbers of them."""

    def maps(self, teacher_layers: Iterable[Seen]) -> list[Tensor]:
        return [mean_heads(p) for p in super().maps(teacher_layers)]

    def _log_maps(self, student_layers: Sequence[Seen]) -> list[Tensor]:
        # the log of the mean, where a single p may underflow
        log_maps = super()._log_maps(student_layers)
        return [log_p.logsumexp(1, keepdim=True) - math.log(log_p.shape[1]) for log_p in log_maps]


class _LearnedHeads(_WrittenOut):
    """Every head of the teacher as a learned mixture of the student's, M of each layer: Distill alone."""

    def __init__(self, plan: Plan, pairing: Pairing, teacher_heads: int, student_heads: int):
        super().__init__(plan, pairing, teacher_heads, student_heads)
        mean = torch.full((teacher_heads, student_heads), 1 / student_heads)  # over heads: where M starts
        self.head_mapping = nn.ParameterList(mean.clone() for _ in pairing.layers)

    def _differences(self, student_layers: Sequence[Seen], maps: Sequence[Tensor]) -> Iterator[Tensor]:
        pairs = zip(self.head_mapping, student_layers)
        mixed = (torch.einsum("ts,bsij->btij", M, seen.map) for M, seen in pairs)
        return (nn.functional.mse_loss(guess, p) for guess, p in zip(mixed, maps))


def _check_served_by_maps(plan: Plan, pairing: Pairing, student: nn.Module) -> None:
    """Raise `ValueError` for what a plan asks of a teacher that its maps alone do not say."""
    if plan.what != "map":
        raise ValueError(f"maps= holds maps, and the plan transfers {plan.what!r}: run the teacher for that")
    if drops(student) and plan.share_drop_path:
        raise ValueError("maps= are of the whole teacher: take share_drop_path=False")


def _form_of(plan: Plan, pairing: Pairing, teacher: Sizes, student: Sizes, given: bool) -> _Form:
    """The form that a plan's transfer takes between two models. given: as maps, not as q and k."""
    some_heads = plan.how == "copy" and plan.heads is not None
    if plan.what != "map":
        form = _OnePart
    elif pairing.heads_differ and plan.unequal_heads == "learn":
        form = _LearnedHeads
    elif pairing.heads_differ and plan.unequal_heads == "average":
        form = _MeanOfHeads
    elif (
        given
        or plan.average is not None
        or pairing.queries is not None
        or pairing.teacher_grid != pairing.student_grid
        # Heads of another width cannot stand among the student's own as q and k, only as maps; nor can some
        # heads look where others must not, but as maps.
        or some_heads
        and (pairing.widths_differ or teacher.masked)
    ):
        form = _WrittenOut
    else:
        form = _MapFree
    return form(plan, pairing, teacher.heads, student.heads)


def drops(student: nn.Module) -> bool:
    """Whether a model has stochastic depth."""
    return any(
        getattr(part, "drop_prob", None) for part in student.modules() if "DropPath" in type(part).__name__
    )


def _refuse_ddp_around(student: nn.Module) -> bool:
    """Raise `ValueError` for a student that is trained outside the forward of the `DistributedDataParallel`
    that holds it, whose gradients would never be averaged; True where it is not."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if distributed and DistributedDataParallel._active_ddp_module is None:
        holders = (
            wrapper for wrapper in gc.get_objects() if issubclass(type(wrapper), DistributedDataParallel)
        )
        if any(wrapper.module is student for wrapper in holders):
            raise ValueError("wrap the pair in DistributedDataParallel, not its student")
    return True


def _one_by_one(layers: list[Seen]) -> Iterator[Seen]:
    """The layers in their order, each let go of when it is handed out, where the caller keeps no list."""
    waiting = layers[::-1]
    del layers
    while waiting:
        yield waiting.pop()


def _constant(seen: Seen, parts: str) -> Seen:
    """Some parts of what a teacher's layer saw; of q and k with the bias on their scores."""
    # Copies outlive inference mode, which autograd needs, and let go of the rest of the joint projection,
    # which memory needs.
    q, k, v = (getattr(seen, name).clone() if name in parts else None for name in "qkv")
    added = (seen.bias, seen.mask) if parts == "qk" else (None, None)
    bias, mask = (None if of_scores is None else of_scores.clone() for of_scores in added)
    return Seen(q, k, v, seen.scale, bias=bias, mask=mask)


def _on_tokens(seen: Seen, tokens: Sequence[int] | None) -> Seen:
    """What a layer saw among some tokens only; softmax over fewer keys is the map with its rows
    renormalised."""
    if tokens is None:
        return seen
    count = next(x.shape[2] for name in "qkv" if (x := getattr(seen, name)) is not None)
    if tokens[-1] + 1 != count:  # the last patch is among them
        raise ValueError(f"these images make {count} tokens, and the pair was built for {tokens[-1] + 1}")
    return seen._replace(
        **{name: x[:, :, tokens] for name in "qkv" if (x := getattr(seen, name)) is not None},
        bias=None if seen.bias is None else seen.bias[..., tokens, :][..., tokens],
        mask=None if seen.mask is None else seen.mask[..., tokens, :][..., tokens],
    )


def _select(seen: Seen, heads: Sequence[int] | None) -> Seen:
    """What some heads of a layer saw; all for None."""
    if heads is None:
        return seen
    parts = {name: x[:, heads] for name in "qkv" if (x := getattr(seen, name)) is not None}
    return seen._replace(**parts, bias=_of_heads(seen.bias, heads))


def _of_heads(bias: Tensor | None, heads: Sequence[int] | None) -> Tensor | None:
    """The bias of some heads; one (N, N) is that of all."""
    return bias if heads is None or bias is None or bias.ndim == 2 else bias[list(heads)]
