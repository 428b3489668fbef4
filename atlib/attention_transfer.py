"""Teacher and student as one module: what the plan takes from the teacher, copied or distilled."""

import gc
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from atlib.attention import DropPathMasks, Instead, Seen, Walk, forbid, outputs, sample_drop_path, walk
from atlib.compatibility import examine, pair_up
from atlib.losses import attention_cross_entropy, map_cross_entropy, note, projection_mse
from atlib.maps import average_over, join_heads, keep_own, keep_tokens, mean_heads, place_tokens, resample
from atlib.pair import Normalisation, Pair, check_images
from atlib.plan import Plan

TEMPERATURE = 10.0  # of the aggregation of heads: AttnDistill (arXiv 2210.00944)
# What the teacher would be given, (B, 3, height, width) -> {its layer: its maps, (B, H, N, N)}
TeacherMaps = Callable[[Tensor], Mapping[int, Tensor]]


class Transferred(NamedTuple):
    """What the pair computes."""

    logits: Tensor  #: The student's, (B, classes).
    transfer_loss: Tensor  #: A scalar, unweighted; 0 for Copy, nan where Distill is evaluated.


class AttentionTransfer(Pair):
    """A student that learns everything from scratch except what `plan` takes from the teacher. Both are
    models that `walk` sees. Copy needs the teacher at inference too; after Distill, `.student` alone is the
    result. maps: in place of running the teacher, such as stored ones (`atlib.MapCache`). normalisation: of
    the images that the pair is given. Raises `ValueError` when the two cannot be paired, and `Unwalkable` for
    models that `walk` refuses."""

    def __init__(
        self,
        teacher: nn.Module,
        student: nn.Module,
        plan: Plan,
        maps: TeacherMaps | None = None,
        *,
        normalisation: Normalisation | None = None,
    ):
        of_teacher, projections_of_teacher = examine(teacher, student)
        of_student, projections = examine(student, teacher)
        pairing = pair_up(teacher, student, plan, (of_teacher, of_student))
        if maps is not None and plan.what != "map":
            raise ValueError(f"maps= holds maps, and the plan transfers {plan.what!r}")
        if maps is not None and plan.share_drop_path and drops(student):
            raise ValueError("maps= are of the whole teacher: take share_drop_path=False")
        super().__init__(student, teacher, normalisation=normalisation)
        if of_teacher.image != of_student.image:  # also of models that do not say which alone they take
            self.views = (self.views[0]._replace(size=of_teacher.image),)
        self.plan = plan
        self.pairing = pairing
        self._teacher_sizes, self._student_sizes = of_teacher, of_student
        self._maps = maps
        self._built_with = (student,)  # of which the projections are
        self._ddp_checked = False  # once, at the first step
        self.layers = tuple(layer for layer, _ in pairing.layers)
        one_to_one = all(layer == layer_of_teacher for layer, layer_of_teacher in pairing.layers)
        self._same_masks = one_to_one and of_teacher.depth == of_student.depth
        self._projections, self._projections_of_teacher = projections, projections_of_teacher
        self._unequal_heads = plan.unequal_heads if of_teacher.heads != of_student.heads else None
        # the transferred heads of each transferred layer, None for all
        self._heads = [plan.heads_of(layer, of_student.heads) for layer in self.layers]
        self._parts = "qk" if plan.what == "map" else plan.what  # what is kept of a teacher's layer
        # Heads of another width cannot stand among the student's own as q and k, only as maps; nor can some
        # heads look where others must not, but as maps.
        some_heads = plan.how == "copy" and plan.heads is not None
        self._dense = plan.what == "map" and (
            maps is not None
            or plan.average is not None
            or bool(pairing.rest)
            or of_teacher.grid != of_student.grid
            or self._unequal_heads in ("average", "learn")
            or (some_heads and (of_teacher.head_width != of_student.head_width or of_teacher.masked))
        )
        #: Of "learn", what is learned beside the student: every head of the teacher as a mixture of the
        #: student's, a matrix for each layer.
        self.head_mapping = None
        if self._unequal_heads == "learn":
            mean = torch.full((of_teacher.heads, of_student.heads), 1 / of_student.heads)
            self.head_mapping = nn.ParameterList(mean.clone() for _ in self.layers)
        # the rows and columns of a map that stay the student's own
        self._kept = (pairing.rest, pairing.own_keys) if pairing.rest else None

    @property
    def path(self) -> str:
        """What happens to maps: "map-free", none is ever stored, or "dense", they are written out."""
        return "dense" if self._dense else "map-free"

    def extra_repr(self) -> str:
        """The teacher, which is no part of the module, and the plan."""
        return f"teacher={type(self.teacher).__name__}, {self.plan}"

    @property
    def needs_teacher(self) -> bool:
        """True for Copy, False for Distill."""
        return self.plan.how == "copy"

    def forward(self, images: Tensor) -> Transferred:
        """Student logits (B, classes) and the unweighted transfer loss for images (B, 3, height, width), or
        for pairs (B, 2, 3, height, width) of what the student and what the teacher sees (`atlib.data.pair`).
        In evaluation, which is eval mode without gradients, a distilling pair's loss is nan."""
        if not (self.training or self.needs_teacher or torch.is_grad_enabled()):
            images, _ = self._apart(images)
            logits = outputs(self.student, images)
            return Transferred(logits, logits.new_full((), math.nan))
        seen, transfer_loss = self.walk_with_loss(images)
        return Transferred(seen.logits, transfer_loss)

    def walk(self, images: Tensor) -> Walk:
        """The walk that `forward` takes its logits from; where it distills, the teacher is not run."""
        images, teacher_images = self._apart(images)
        masks = self._masks(images)
        if self.plan.how == "distill":
            return self._student_walk(images, masks)
        replace = self._replacements(self.teacher_layers(teacher_images, masks))
        return self._student_walk(images, masks, replace)

    def walk_with_loss(self, images: Tensor) -> tuple[Walk, Tensor]:
        """The walk that `forward` takes its logits from, and the transfer loss, a scalar."""
        if self.plan.how == "copy":
            seen = self.walk(images)
            return seen, seen.logits.new_zeros(())
        images, teacher_images = self._apart(images)
        masks = self._masks(images)
        targets = self.teacher_layers(teacher_images, masks)
        seen = self._student_walk(images, masks)
        # Popped: the gradients of a layer, made at once, take the room of its target.
        if self._dense:
            targets = self.teacher_maps(targets.pop(0) for _ in self.layers)
        loss = 0.0
        for index, layer in enumerate(self.layers):
            layer_loss = self._loss(index, seen.layers[layer], targets.pop(0))
            loss = loss + note(f"transfer_loss/layer_{layer}", layer_loss)
        return seen, loss

    def _apart(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """What the student sees and what the teacher sees, each (B, 3, height, width)."""
        if self._student_sizes.image is None:  # texts, clips
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
        self, images: Tensor, masks: list[DropPathMasks] | None, replace: Mapping[int, Instead] | None = None
    ) -> Walk:
        if self.student is not self._built_with[0]:
            raise ValueError("the pair's student was replaced after it was built: build another pair")
        learns = self.training and torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if not self._ddp_checked and learns:
            _check_ddp(self.student)
            self._ddp_checked = True
        return walk(self.student, images, replace=replace, drop_path=masks, projections=self._projections)

    def teacher_layers(self, images: Tensor, drop_path=None) -> list[Seen]:
        """What the teacher's transferred layers saw, as constants, on the tokens that both have: what the
        plan needs of q, k, v, or the map that `maps` gives."""
        layers, shown = [of_teacher for _, of_teacher in self.pairing.layers], self.for_teacher(images)
        if self._maps is not None:
            maps = self._maps(shown)
            kept = [Seen(None, None, None, 1.0, given=maps[layer]) for layer in layers]
        else:
            with self.frozen_teachers():
                seen = walk(
                    self.teacher,
                    shown,
                    stop_after=max(layers),
                    values="v" in self._parts,
                    drop_path=drop_path if self._same_masks else None,
                    projections=self._projections_of_teacher,
                ).layers
            # of a teacher in half precision, in the student's
            dtype = None if shown.dtype == images.dtype else images.dtype
            kept = [_constant(seen[layer], self._parts, dtype) for layer in layers]
        return [_on_tokens(layer, self.pairing.teacher_tokens) for layer in kept]

    def teacher_maps(self, teacher_layers: Iterable[Seen]) -> list[Tensor]:
        """The teacher's maps as the plan wants them, one (B, H, N, N) per layer, with zeros for tokens that
        only the student has."""
        if self.plan.what != "map":
            raise ValueError(f"this plan transfers {self.plan.what!r}, and no maps: use what='map'")
        maps = [self._merged(seen).map for seen in teacher_layers]
        if self._dense:
            grids = self._teacher_sizes.grid, self._student_sizes.grid
            maps = [resample(p, *grids, self.pairing.common_prefix) for p in maps]
            if self.plan.average is not None:
                maps = average_over(maps, self.plan.average)
            if self.pairing.own_keys:
                maps = [place_tokens(p, self.pairing.student_tokens, self.pairing.tokens) for p in maps]
            if self._unequal_heads == "average":
                maps = [mean_heads(p) for p in maps]
        return maps

    def _replacements(self, teacher_layers: Sequence[Seen]) -> dict[int, Instead]:
        """What each of the student's layers uses instead of its own: Copy."""
        if self._dense:
            maps = zip(self.teacher_maps(teacher_layers), self._heads)
            new = [Instead(map=self._spread(p, heads), heads=heads, kept=self._kept) for p, heads in maps]
        else:
            layers = zip(teacher_layers, self._heads)
            new = [self._instead(self._merged(seen), heads) for seen, heads in layers]
        return dict(zip(self.layers, new))

    def _instead(self, seen: Seen, heads: Sequence[int] | None) -> Instead:
        """The teacher's q, k or v for some heads of the student; or q and k with what makes a map of them."""
        parts = {part: self._spread(getattr(seen, part), heads) for part in self._parts}
        if self._parts == "qk":
            parts |= {"scale": seen.scale, "bias": _of_heads(seen.bias, heads), "mask": seen.mask}
        return Instead(**parts, heads=heads)

    def _loss(self, index: int, seen: Seen, target: Seen | Tensor) -> Tensor:
        """Distill's unweighted loss of the layer at that place in `layers`, from what the teacher's layer saw
        or, where maps are dense, from the map that `teacher_maps` made of it."""
        heads, own_keys = self._heads[index], self.pairing.own_keys
        seen = _on_tokens(seen, None if own_keys else self.pairing.student_tokens)
        seen = _select(self._merged(seen), heads)
        if not self._dense:
            target = _select(self._merged(target), heads)
            if self.plan.what == "map":
                return attention_cross_entropy([seen], [target])
            return projection_mse([seen], [target], self.plan.what)
        # heads are chosen last, as an average is over all; what the student's layer forbids goes
        p = forbid(target if heads is None else target[:, heads], seen.mask)
        if self.head_mapping is not None:
            mixed = torch.einsum("ts,bsij->btij", self.head_mapping[index], seen.map)
            return nn.functional.mse_loss(mixed, p)
        log_p = seen.scores.log_softmax(-1)
        if self._unequal_heads == "average":  # the log of the mean, where a single p may underflow
            log_p = log_p.logsumexp(1, keepdim=True) - math.log(log_p.shape[1])
        if self._kept is not None:
            p = keep_own(p, log_p.detach().exp(), *self._kept)
            log_p, p = log_p[:, :, self.pairing.queries], p[:, :, self.pairing.queries]
        return map_cross_entropy(log_p, p)

    def _merged(self, seen: Seen) -> Seen:
        """A layer with its heads merged into one, where the plan says so (`atlib.maps.aggregate_heads`), as q
        and k: no map is needed."""
        if self._unequal_heads != "aggregate":
            return seen
        if seen.given is not None:
            if seen.given.shape[1] != 1:  # the logarithm of maps that were stored in float16 would be wrong
                raise ValueError("unequal_heads='aggregate' of maps=: give them through aggregate_heads")
            return seen
        bias = seen.bias
        if bias is not None:  # the sum over heads, as of their scores
            of_heads = bias.expand(*bias.shape[:-3], seen.q.shape[1], *bias.shape[-2:])
            bias = of_heads.sum(-3, keepdim=bias.ndim == 4) / TEMPERATURE
        q, k = join_heads(seen.q), join_heads(seen.k)
        return Seen(q, k, None, seen.scale / TEMPERATURE, bias=bias, mask=seen.mask)

    def _spread(self, x: Tensor, heads: Sequence[int] | None) -> Tensor:
        """What goes to the student's heads: a single head to all of them, else the chosen ones."""
        x = x.expand(-1, self._student_sizes.heads, -1, -1) if x.shape[1] == 1 else x
        return x if heads is None else x[:, heads]


def _check_ddp(student: nn.Module) -> None:
    """Raise `ValueError` for a student that is trained outside the `DistributedDataParallel` that holds it:
    its gradients would never be averaged."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if distributed and DistributedDataParallel._active_ddp_module is None:
        wrappers = (x for x in gc.get_objects() if issubclass(type(x), DistributedDataParallel))
        if any(wrapper.module is student for wrapper in wrappers):
            raise ValueError("wrap the pair in DistributedDataParallel, not its student")


def drops(student: nn.Module) -> bool:
    """Whether a model has stochastic depth."""
    return any(
        getattr(part, "drop_prob", None) for part in student.modules() if "DropPath" in type(part).__name__
    )


def _constant(seen: Seen, parts: str, dtype: torch.dtype | None) -> Seen:
    """Some parts of what a teacher's layer saw, in `dtype` or their own; of q and k with the bias on their
    scores."""
    # Copies outlive inference mode, which autograd needs, and let go of the rest of the joint projection,
    # which memory needs.
    names = ("q", "k", "bias", "mask") if parts == "qk" else parts
    kept = {
        name: x.to(dtype or x.dtype, copy=True) for name in names if (x := getattr(seen, name)) is not None
    }
    return Seen(None, None, None, seen.scale)._replace(**kept)


def _on_tokens(seen: Seen, tokens: Sequence[int] | None) -> Seen:
    """What a layer saw among some tokens only; softmax over fewer keys is the map renormalised."""
    if tokens is None:
        return seen
    parts = {name: x for name in ("q", "k", "v", "given") if (x := getattr(seen, name)) is not None}
    count = next(iter(parts.values())).shape[2]
    if tokens[-1] + 1 != count:  # the last patch is among them
        raise ValueError(f"these images make {count} tokens, and the pair was built for {tokens[-1] + 1}")
    if seen.given is not None:
        return seen._replace(given=keep_tokens(seen.given, tokens))
    added = {"bias": seen.bias, "mask": seen.mask}
    return seen._replace(
        **{name: x[:, :, tokens] for name, x in parts.items()},
        **{name: x if x is None else x[..., tokens, :][..., tokens] for name, x in added.items()},
    )


def _select(seen: Seen, heads: Sequence[int] | None) -> Seen:
    """What some heads of a layer saw; all for None."""
    if heads is None:
        return seen
    parts = {name: x[:, heads] for name in "qkv" if (x := getattr(seen, name)) is not None}
    return seen._replace(**parts, bias=_of_heads(seen.bias, heads))


def _of_heads(bias: Tensor | None, heads: Sequence[int] | None) -> Tensor | None:
    """The bias of some heads, (N, N), (H, N, N) or (B, H, N, N)."""
    of_all = heads is None or bias is None or bias.ndim == 2 or bias.shape[-3] == 1
    return bias if of_all else bias[..., list(heads), :, :]
