"""Teacher and student as one module: what the plan takes from the teacher, copied or distilled."""

import gc
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from atlib.attention import DropPathMasks, Seen, Walk, outputs, sample_drop_path, walk
from atlib.compatibility import examine, pair_up
from atlib.forms import Form
from atlib.losses import note
from atlib.pair import Normalisation, Pair, check_images
from atlib.plan import Plan

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

    Both are models that `walk` sees, of the same library or not. The teacher is run no further than the plan
    needs. Copy needs it at inference too; after Distill, `.student` alone is the result.

    maps: in place of running the teacher, such as maps that were stored (`atlib.MapCache`). normalisation: of
    the images that the pair is given. Raises `ValueError` when the two cannot be paired, and `Unwalkable` for
    models `walk` refuses.
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
        self._maps = maps
        self._built_with = (student,)  # of which the projections are
        self._looked = False  # for a DDP that holds the student: once, at the first step
        self.layers = tuple(layer for layer, _ in pairing.layers)
        one_to_one = all(layer == layer_of_teacher for layer, layer_of_teacher in pairing.layers)
        self._same_masks = one_to_one and of_teacher.depth == of_student.depth
        self._projections, self._projections_of_teacher = projections, projections_of_teacher
        self._sees_images = of_student.image is not None
        self._form = Form(plan, pairing, of_teacher, of_student, maps is not None)
        self.head_mapping = self._form.head_mapping  # registered here: the form is no module

    @property
    def path(self) -> str:
        """What happens to maps: "map-free", none is ever stored, or "dense", they are written out."""
        return "dense" if self._form.dense else "map-free"

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

    def walk_with_loss(self, images: Tensor) -> tuple[Walk, Tensor]:
        """The walk that `forward` takes its logits from, and the transfer loss, a scalar."""
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
        """The walk that `forward` takes its logits from; where it distills, the teacher is not run."""
        images, teacher_images = self._apart(images)
        masks = self._masks(images)
        teacher_layers = self.teacher_layers(teacher_images, masks) if self.needs_teacher else []
        return self._student_walk(images, teacher_layers, masks)

    def _apart(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """What the student sees and what the teacher sees, each (B, 3, height, width)."""
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
        """Raise `ValueError` for another student than the pair was built with, and for one that is trained
        outside the `DistributedDataParallel` that holds it: its gradients would never be averaged."""
        if self.student is not self._built_with[0]:
            raise ValueError("the pair's student was replaced after it was built: build another pair")
        if self._looked or not self.training or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        if distributed and DistributedDataParallel._active_ddp_module is None:
            wrappers = (one for one in gc.get_objects() if issubclass(type(one), DistributedDataParallel))
            if any(wrapper.module is self.student for wrapper in wrappers):
                raise ValueError("wrap the pair in DistributedDataParallel, not its student")
        self._looked = True

    def teacher_layers(self, images: Tensor, drop_path=None) -> list[Seen]:
        """What the teacher's transferred layers saw, on the tokens that both have, as constants: what the
        plan needs of q, k, v, or the given map where `maps` stand in for the teacher."""
        layers, tokens = [of_teacher for _, of_teacher in self.pairing.layers], self.pairing.teacher_tokens
        shown = self.for_teacher(images)
        if self._maps is not None:
            maps = self._maps(shown)
            given = [Seen(None, None, None, 1.0, given=maps[layer]) for layer in layers]
            return [_on_tokens(layer, tokens) for layer in given]
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
        return [_on_tokens(layer, tokens) for layer in kept]

    def teacher_maps(self, teacher_layers: Iterable[Seen]) -> list[Tensor]:
        """The teacher's maps as the plan wants them, one (B, H, N, N) per layer (`atlib.forms.Form.maps`)."""
        if self.plan.what != "map":
            raise ValueError(f"this plan transfers {self.plan.what!r}, and no maps: use what='map'")
        return self._form.maps(teacher_layers)


def drops(student: nn.Module) -> bool:
    """Whether a model has stochastic depth."""
    return any(
        getattr(part, "drop_prob", None) for part in student.modules() if "DropPath" in type(part).__name__
    )


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
    """What a layer saw among some tokens only; softmax over fewer keys is the map renormalised."""
    if tokens is None:
        return seen
    parts = {name: x for name in ("q", "k", "v", "given") if (x := getattr(seen, name)) is not None}
    count = next(iter(parts.values())).shape[2]
    if tokens[-1] + 1 != count:  # the last patch is among them
        raise ValueError(f"these images make {count} tokens, and the pair was built for {tokens[-1] + 1}")
    if seen.given is not None:
        from atlib.maps import keep_tokens  # here: q and k need no file of operations on maps

        return seen._replace(given=keep_tokens(seen.given, tokens))
    added = {"bias": seen.bias, "mask": seen.mask}
    return seen._replace(
        **{name: x[:, :, tokens] for name, x in parts.items()},
        **{name: x if x is None else x[..., tokens, :][..., tokens] for name, x in added.items()},
    )
