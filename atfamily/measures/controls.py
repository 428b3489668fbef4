"""Does a student follow its teacher's maps, or read them? The controls that tell.

A copied map can do two things for a student: fetch what is in the image at the right place (routing), and say
something of the image by itself (a message). Each control takes one of the two away, in training and in
testing.

- **jigsaw**: the image's own maps, over patches in one fixed shuffled order. What a map says stays, its
  sharpness stays, and it points at the wrong patches. The same as showing the student its patches in another
  order.
- **mean map**: one map for all images. It says nothing of an image.
- **blank**: a grey image for the student, and the maps of the real one. What it gets right it has
  read in them.
- **oracle**: perfect routing by who knows where things are, and nothing else.
- **twins**: the maps of another image that shares one thing with this one, such as its places or its label.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from scipy import stats
from torch import Tensor, nn

from atfamily.measures.predictions import Interval, paired_bootstrap
from atlib._util import in_eval_mode
from atlib.attention import walk
from atlib.attention_transfer import AttentionTransfer, TeacherMaps, Transferred
from atlib.baselines import mean_maps
from atlib.compatibility import sizes_of
from atlib.evaluate import predict
from atlib.loading import EvaluationData, seed_for
from atlib.maps import aggregate_heads
from atlib.pair import View
from atlib.plan import Plan
from atlib.recipe import Recipe
from atlib.train import train

SCRATCH, COPIED = "scratch", "own maps"  # what the other rows of the table lie between


class Control(NamedTuple):
    """One row: which test images its students have right, a student for each seed."""

    name: str
    #: bool (seeds, images)
    right: Tensor
    #: The learning rate of its students; None where nothing was trained.
    lr: float | None = None

    @property
    def accuracy(self) -> float:
        return self.right.double().mean().item()


# --- Maps with one thing changed ---


def maps_of(teacher: nn.Module) -> TeacherMaps:
    """The teacher's own maps, made anew for every batch: what `AttentionTransfer(maps=)` takes. images (B, 3,
    height, width), as the teacher was trained to see them, to {layer: (B, H, N, N)}."""

    @torch.no_grad()
    def maps(images: Tensor) -> Mapping[int, Tensor]:
        with in_eval_mode(teacher):
            layers = walk(teacher, images, head=False).layers
        return {layer: seen.map for layer, seen in enumerate(layers)}

    return maps


def patch_order(patches: int, prefix: int, seed: int) -> Tensor:
    """A shuffled order of tokens, (prefix + patches,), in which the prefix tokens stay where they are. No
    patch stays at its place: another order is drawn until that is so."""
    if patches < 2:
        raise ValueError(f"{patches} patch cannot be shuffled: at least 2 are needed")
    generator = torch.Generator().manual_seed(seed)
    places = torch.arange(patches)
    while ((order := torch.randperm(patches, generator=generator)) == places).any():
        pass
    return torch.cat([torch.arange(prefix), prefix + order])


def jigsaw(maps: TeacherMaps, order: Tensor) -> TeacherMaps:
    """Maps whose queries and keys are in another order, the same for all images, layers and heads: new(i, j)
    = old(order[i], order[j])."""

    def shuffled(images: Tensor) -> Mapping[int, Tensor]:
        return {layer: p[:, :, order][:, :, :, order] for layer, p in maps(images).items()}

    return shuffled


def mean_map(teacher: nn.Module, batches: Iterable[Tensor]) -> TeacherMaps:
    """The mean of the teacher's maps over images in batches (B, 3, height, width), as it was trained to see
    them: one map for all images."""
    means = mean_maps(teacher, batches)

    def mean_of_all(images: Tensor) -> Mapping[int, Tensor]:
        return {layer: p.to(images.device).expand(len(images), -1, -1, -1) for layer, p in enumerate(means)}

    return mean_of_all


class BlankPair(AttentionTransfer):
    """A pair whose student sees, for every image, one of zeros: the mean colour, where images are normalised.
    Its teacher sees the image."""

    def forward(self, images: Tensor) -> Transferred:
        """As `AttentionTransfer.forward`, for images (B, 3, height, width)."""
        return super().forward(torch.stack([torch.zeros_like(images), images], 1))


# --- The experiment ---


def controls(
    teacher: nn.Module,
    student: Callable[[], nn.Module],
    images: Any,
    held_out: EvaluationData,
    recipe: Recipe,
    *,
    plan: Plan = Plan(),
    oracle: TeacherMaps | None = None,
    twins: Mapping[str, Callable[[Any], Any]] = {},
    rates: Sequence[float] = (),
    validation: EvaluationData | None = None,
    seeds: int = 3,
    progress: bool = True,
) -> list[Control]:
    """Train a student from scratch, one by the plan with the image's own maps, and one under each control,
    and test them on the same images.

    student: builds a new one; its first weights follow torch's seed, which is set before. images, held_out:
    what `atlib.data` opens. oracle: the maps of who knows where things are. twins: {name: images -> pairs of
    the student's image and the teacher's} (`atlib.data.pair`). rates: learning rates, of which each row takes
    the one that is best on `validation`, with a seed of its own; none: the recipe's. Distill has no blank
    row, since its student is tested alone.
    """
    normalisation = getattr(images, "normalisation", None)

    def transfer(
        given: TeacherMaps | None = None, kind: type[AttentionTransfer] = AttentionTransfer
    ) -> nn.Module:
        learner = student()
        if given is not None:
            given = _aggregated(given, plan, teacher, learner)
        return kind(teacher, learner, plan, maps=given, normalisation=normalisation)

    view = View.of(teacher)
    mean = mean_map(teacher, (view.show(some, normalisation) for some, _ in images.loader(250)))
    builds = {
        SCRATCH: student,
        COPIED: transfer,
        "jigsaw": lambda: transfer(jigsaw(maps_of(teacher), _order_of(teacher))),
        "mean map": lambda: transfer(mean),
    }
    if plan.how == "copy":
        builds["blank"] = lambda: transfer(kind=BlankPair)
    if oracle is not None:
        builds["oracle"] = lambda: transfer(oracle)
    builds |= dict.fromkeys(twins, transfer)

    def right(name: str, lr: float, seed: int, tested_on: EvaluationData) -> Tensor:
        """Which images a new student has right."""
        seen_as = twins.get(name, lambda some: some)
        torch.manual_seed(seed_for(seed, "student"))
        model = builds[name]()
        label = f"{name}, lr {lr:g}, seed {seed}" if progress else None
        train(model, seen_as(images), replace(recipe, lr=lr), seed=seed_for(seed, "order"), progress=label)
        return predict(model, seen_as(tested_on)).argmax(1) == torch.as_tensor(tested_on.targets)

    rows = []
    for name in builds:
        lr = recipe.lr
        if rates:
            scores = {rate: right(name, rate, seeds, validation).double().mean().item() for rate in rates}
            lr = max(scores, key=scores.__getitem__)
        rows.append(Control(name, torch.stack([right(name, lr, s, held_out) for s in range(seeds)]), lr))
    return rows


@torch.no_grad()
def switched(
    pair: AttentionTransfer, held_out: EvaluationData, reference: EvaluationData, batch_size: int = 250
) -> list[Control]:
    """What a trained student of Copy makes of other maps than those that it learned with; nothing is trained.

    It sees its image with its own maps, with those over shuffled patches, with the mean map of `reference`,
    and with the maps of an image of another class, once scored by its own class and once by the other's; and
    a blank image with its own maps. It asks whether a student *follows* its maps now, not whether it needs
    them to learn.
    """
    if pair.plan.what != "map" or not pair.needs_teacher:
        raise ValueError(f"{pair.plan.how} of {pair.plan.what!r}: only copied maps can be switched")
    teacher, student = pair.teacher, pair.student
    like = next(student.parameters())
    shown = (pair.for_teacher(images.to(like)) for images, _ in reference.loader(batch_size))

    def with_maps(maps: TeacherMaps) -> AttentionTransfer:
        maps = _aggregated(maps, pair.plan, teacher, student)
        return AttentionTransfer(teacher, student, pair.plan, maps=maps, normalisation=pair.normalisation)

    shuffled = with_maps(jigsaw(maps_of(teacher), _order_of(teacher)))
    mean = with_maps(mean_map(teacher, shown))
    labels = torch.as_tensor(held_out.targets)
    other = _of_another_class(labels)
    answers: dict[str, list[Tensor]] = {}
    with in_eval_mode(student):
        for places in torch.arange(len(labels)).split(batch_size):
            images, others = (held_out.take(some.tolist())[0].to(like) for some in (places, other[places]))
            for name, model, seen in (
                (COPIED, pair, images),
                ("jigsaw", shuffled, images),
                ("mean map", mean, images),
                ("another class", pair, torch.stack([images, others], 1)),
                ("blank", pair, torch.stack([torch.zeros_like(images), images], 1)),
            ):
                answers.setdefault(name, []).append(model(seen).logits.argmax(1).cpu())
    given_answers = {name: torch.cat(parts) for name, parts in answers.items()}
    rows = [Control(name, (answer == labels)[None]) for name, answer in given_answers.items()]
    says_other = given_answers["another class"] == labels[other]
    return [*rows, Control("another class, says that class", says_other[None])]


def _aggregated(maps: TeacherMaps, plan: Plan, teacher: nn.Module, student: nn.Module) -> TeacherMaps:
    """Maps with their heads merged where the plan merges those of these two."""
    if plan.unequal_heads != "aggregate" or sizes_of(teacher).heads == sizes_of(student).heads:
        return maps
    return lambda images: {layer: aggregate_heads(p) for layer, p in maps(images).items()}


def _order_of(teacher: nn.Module) -> Tensor:
    sizes = sizes_of(teacher)
    return patch_order(sizes.grid[0] * sizes.grid[1], sizes.prefix, seed_for(0, "twins"))


def _of_another_class(labels: Tensor) -> Tensor:
    """For each image the next one, counted round, whose label (n,) is another."""
    if (labels == labels[0]).all():
        raise ValueError(f"all {len(labels)} images are of class {labels[0]}: at least 2 classes are needed")
    places = torch.arange(len(labels))
    other = (places + 1) % len(labels)
    while (same := labels[other] == labels).any():
        other[same] = (other[same] + 1) % len(labels)
    return other


def controls_table(rows: Sequence[Control]) -> str:
    """The rows of `controls` or `switched` as a Markdown table: accuracy, the difference to the image's own
    maps with its 95 % interval, and what share of the gain over scratch is kept, where there is scratch.

    The interval is Student's over seeds; with one seed it is over images (`paired_bootstrap`), and says
    nothing of other seeds.
    """
    of = {row.name: row for row in rows}
    copied, scratch = of[COPIED], of.get(SCRATCH)
    lines = ["| maps | accuracy | less own maps | gain kept |", "| --- | --- | --- | --- |"]
    for row in rows:
        mean, low, high = (f"{100 * value:+.1f}" for value in _difference(row.right, copied.right))
        kept = "–"
        if scratch is not None and copied.accuracy != scratch.accuracy:
            gain = (row.accuracy - scratch.accuracy) / (copied.accuracy - scratch.accuracy)
            kept = f"{100 * gain:.0f} %"
        apart = "" if row is copied else f"{mean} [{low}, {high}]"
        lines.append(f"| {row.name} | {100 * row.accuracy:.1f} | {apart} | {kept} |")
    return "\n".join(lines).replace("-", "−").replace("−−−", "---")


def _difference(first: Tensor, second: Tensor) -> Interval:
    """The difference of two accuracies within seeds, (seeds, images) each, with a 95 % interval."""
    if len(first) == 1:
        return paired_bootstrap(first[0], second[0])
    apart = (first.double() - second.double()).mean(1)
    mean, error = apart.mean().item(), apart.std().item() / len(apart) ** 0.5
    reach = stats.t.ppf(0.975, len(apart) - 1) * error
    return Interval(mean, mean - reach, mean + reach)
