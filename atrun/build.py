"""What a run is put together from, made from its config: images, teacher, the model to train, its loss."""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from atfamily.contrast import contrast_loss
from atfamily.detection.detector import DETECTORS, SIZES, detection_loss
from atfamily.distillation_token import DistillationToken
from atfamily.distilled_mae import distilled_mae_loss
from atfamily.simmim import simmim_loss
from atlib.attention_transfer import AttentionTransfer
from atlib.baselines import FeatureDistillation, LogitDistillation, MeanMapCopy
from atlib.checkpoint import load_vit, read_header
from atlib.compatibility import pair_up
from atlib.loading import seed_for
from atlib.mae import mae_loss
from atlib.objectives import Loss, student_loss, unlabelled_loss
from atlib.pair import IMAGENET, Normalisation, Pair, attach, image_size_of, student_of
from atlib.plan import Plan
from atlib.student import differences, unlike
from atlib.vit import Architecture, without_weights
from atrun.config import COCO, UNTRAINED, RunConfig, built_for
from atrun.data.catalogue import CATALOGUE, draw
from atrun.data.coco import CocoObjects
from atrun.data.generated import is_generated, maker
from atrun.data.photos import open_photos
from atrun.data.stream import open_stream
from atrun.data.transforms import Augmentation
from atrun.data.views import Look, Views, looks, small_views
from atrun.method import Method
from atrun.teachers.build import Teacher, check_image_size, headless, on_meta
from atrun.teachers.load import is_file, load_teacher

AFTER_THE_MAPS = ("head.", "norm.", "fc_norm.")  # weights that a student need not share to start from others
SMALL_SCALE = (0.2, 1.0)  # of the crops of generated images, which have no augmentation to say it
COCO_SIZE = (118_287, 80)  # images of train2017, 1,021 of them without objects, and classes
# What pre-texts are trained on.
LOSSES = {
    Method.MOCO: contrast_loss,
    Method.DINO: contrast_loss,
    Method.SIMMIM: simmim_loss,
    Method.DMAE: distilled_mae_loss,
    Method.MAE: mae_loss,
}
# Fields of a run that say how data are read.
READING = ("data_path", "image_column", "label_column", "on_corrupt", "workers")


class Built(NamedTuple):
    """A model to train, the architectures of what is kept and of its teacher, what the teacher sees of the
    images, in a line, and the teacher itself, where it is an untrained one, which the run's folder keeps."""

    model: nn.Module
    student: Architecture
    teacher: Architecture | None
    teacher_view: str | None = None
    untrained: nn.Module | None = None


def loss_of(config: RunConfig) -> Loss:
    """What a run trains on: labels or objects (with what is distilled), or a pre-text."""
    if config.detects:
        return detection_loss
    return LOSSES.get(config.method, unlabelled_loss if config.method.pretrains else student_loss)


def training_images(config: RunConfig):
    """The images that a run trains on."""
    data, split, size = config.data, config.training_split, config.data_size
    if is_generated(data):
        images = maker(data)(split=split, size=size, seed=config.seed)
        require_size(config.skeleton(2), images, f"{data} {split}")
        return images.with_augment(small_views(looks_of(config))) if config.method.contrasts else images
    if config.streaming:
        return open_stream(data, count=size, **_photographs(config))
    if config.detects:
        options = {"jitter": config.jitter, "masks": config.detector == "mask-rcnn"}
        images = coco_images(config.data_path, split, size=image_size(config), **options)
    else:
        images = open_photos(data, **_photographs(config))
    return images if size is None else images.select(draw(len(images), size, config.seed, f"{data} {split}"))


def _photographs(config: RunConfig) -> dict[str, Any]:
    """How photographs to train on are opened."""
    augmentation: Augmentation | Views | None = config.augmentation
    if config.method.contrasts:
        if augmentation is None:
            raise ValueError(f"{config.method} compares views: give it an augmentation")
        augmentation = Views(augmentation, looks_of(config, augmentation.scale))
    options = {name: getattr(config, name) for name in ("on_corrupt", "image_column", "label_column")}
    options |= {"path": config.data_path, "split": config.training_split, "augmentation": augmentation}
    return options | {"labelled": not config.method.pretrains}


def looks_of(config: RunConfig, scale: tuple[float, float] = SMALL_SCALE) -> tuple[Look, ...]:
    """The views that a contrast is learned from; scale: of the large crops."""
    return looks(scale, config.local_views if config.method is Method.DINO else 0, config.local_scale)


def require_size(model: nn.Module, images, name: str) -> None:
    """Raise `ValueError` for images of another size than the model takes: some are taken as they are."""
    taken = built_for(student_of(model))
    if taken is not None and taken != (offered := tuple(images.take([0])[0].shape[-2:])):
        raise ValueError(f"the images of {name} come as {offered} pixels, the model takes {taken}")


def held_out_images(data: str, split: str, augmentation: Augmentation | None, reading: Mapping = {}):
    """A split of a data set, treated as in evaluation. reading: some of `READING`."""
    if is_generated(data):
        return maker(data)(split=split, size=None, seed=0)
    options = {"data_path": None, "on_corrupt": "skip", **reading}
    path = options.pop("data_path")
    return open_photos(data, path=path, split=split, augmentation=augmentation, **options)


def held_out(config: RunConfig, split: str | None = None):
    """The images that a run is evaluated on, or those of another split."""
    split = split or config.evaluation_split
    if config.detects:
        return coco_images(config.data_path, split, size=image_size(config), workers=config.workers)
    reading = {name: getattr(config, name) for name in READING}
    return held_out_images(config.data, split, config.augmentation, reading)


def coco_images(folder: str | None, split: str, **options: Any) -> CocoObjects:
    """A split of a folder of COCO's form: images in FOLDER/SPLIT, what is in them in
    FOLDER/annotations/instances_SPLIT.json. options: of `atrun.data.coco.CocoObjects`, size among them."""
    if folder is None:
        raise ValueError(f"data {COCO!r}: --data_path FOLDER, with annotations/instances_{split}.json")
    import_module("pycocotools")  # of an extra: else it would be missed in the evaluation, after hours
    images, file = Path(folder) / split, Path(folder) / "annotations" / f"instances_{split}.json"
    return CocoObjects(images, file, **options)


def image_size(config: RunConfig) -> int:
    """Pixels a side of the images that a run's model takes."""
    if config.augmentation is not None:
        return config.augmentation.image_size
    taken = built_for(config.skeleton(2))
    if taken is None:  # any size: as they come
        return maker(config.data)(split=config.training_split, size=1, seed=0).pixels.shape[-1]
    return taken[0]


def published_size(config: RunConfig) -> tuple[int, int] | None:
    """(training images, outputs of the model) of a run, None where the data must be opened to know."""
    count, classes = None, None
    if config.data == COCO and config.data_path is None and config.training_split == "train2017":
        count, classes = COCO_SIZE
    elif config.data in CATALOGUE and config.data_path is None:
        entry = CATALOGUE[config.data]
        count, classes = entry.images_in(config.training_split), entry.classes
    return None if count is None else (config.data_size or count, classes)


def outputs_for(config: RunConfig, images) -> int:
    """How many outputs a model for these images has: their classes; 0 where no labels are learned."""
    if config.detects:
        return len(images.classes)
    if not config.classifies:
        return 0
    return len(images.classes) or int(images.targets.max()) + 1


def build(
    config: RunConfig, outputs: int, images: Normalisation | None = None, folder: Path | None = None
) -> Built:
    """The untrained model of a run; the seed decides its first weights, or `student_weights`. images: how
    those that it trains on are normalised, None: as the run says; folder: may hold its untrained teacher."""
    teacher, teacher_model = None, None
    if config.teacher == UNTRAINED:
        teacher = untrained_teacher(config, folder)
    elif config.teacher is not None:
        teacher = teacher_of(config)
    if images is None and config.augmentation is not None:
        images = config.augmentation.normalisation
    architecture = config.architecture(outputs)
    # What is pre-trained with a seed and what learns from it are independent.
    torch.manual_seed(seed_for(config.seed, "teacher" if config.method.pretrains else "student"))
    model: nn.Module = architecture.build_classifier()
    if config.student_weights is not None:
        weights = load_teacher(config.student_weights, image_size=image_size(config), quiet=True).vit
        if differ := set(unlike(weights, model, AFTER_THE_MAPS)) - {"pooling"}:
            differing = ", ".join(sorted(differ))
            raise ValueError(f"the student differs from {config.student_weights} in {differing}")
        model = start_from(model, weights)
    if config.method.reads_logits:
        attach(teacher_model := load_vit(config.teacher), teacher.normalisation)
    elif teacher is not None:
        teacher_model = teacher.vit
    if config.method is Method.MEAN_MAPS:
        model = MeanMapCopy(teacher_model, model, reference_images(config), normalisation=images)
    else:
        model = joined(config, model, teacher_model, images)
    of_teacher = teacher.architecture if isinstance(model, Pair) else None
    view = _teacher_view(config, model, teacher, images)
    untrained = teacher_model if config.teacher == UNTRAINED else None
    return Built(with_detector(config, model, outputs), architecture, of_teacher, view, untrained)


def _teacher_view(
    config: RunConfig, model: nn.Module, teacher: Teacher | None, images: Normalisation | None
) -> str | None:
    """What the teacher sees of the images, in a line."""
    sentences = []
    if isinstance(model, Pair):
        sentences.append(_seen(model) if model.teachers else f"its stored maps are of {teacher.name}")
    elif config.method is Method.FINE_TUNE:
        sentences.append(f"the student starts from {teacher.name}, which saw {teacher.view()}")
        if None not in (teacher.normalisation, images) and teacher.normalisation != images:
            sentences.append(f"its own images have {images}, to which it must adapt")
    if teacher is not None and teacher.guessed:
        sentences.append(f"{teacher.guessed}: weights do not show it, --teacher_heads says another")
    return "; ".join(sentences) or None


def _seen(pair: Pair) -> str:
    """What the first teacher of a pair sees."""
    (normalisation, resized_to), size = pair.views[0], image_size_of(pair.teacher)
    at = "" if size is None else f", at {size[0]} x {size[1]} px"
    if normalisation is None:
        return f"the teacher does not say its normalisation: it sees the student's images{at}"
    anew = "" if normalisation == pair.normalisation else f", normalised anew from {pair.normalisation}"
    resized = "" if resized_to is None else ", resized"
    return f"the teacher sees images of {normalisation}{at}{anew}{resized}"


def untrained_teacher(config: RunConfig, folder: Path | None) -> Teacher:
    """The teacher that was never trained, for maps that are worth nothing (arXiv 2411.09702, table of
    pre-training methods, row "none"): the run's folder's, else the student's architecture with first weights.
    """
    name, overrides = config.architecture(0)
    overrides = {key: value for key, value in overrides.items() if key != "drop_path_rate"}
    architecture = Architecture(name, overrides | {"num_classes": 0})
    if folder is not None and (kept := folder / "teacher.safetensors").exists():
        stored = load_teacher(kept, quiet=True)
        if stored.architecture != architecture:
            raise OSError(f"{kept} holds {stored.architecture}, this run has {architecture}")
        return stored
    torch.manual_seed(seed_for(config.seed, "untrained"))
    vit = architecture.build().eval()
    return Teacher(vit, UNTRAINED, architecture, "first weights", used=len(vit.state_dict()), unused=())


def teacher_of(config: RunConfig) -> Teacher:
    """The teacher that a run names, read from the hub or a file."""
    told = {name: getattr(config, f"teacher_{name}") for name in ("heads", "architecture", "normalisation")}
    return load_teacher(config.teacher, image_size=teacher_size(config), quiet=True, **told)


def joined(
    config: RunConfig, student: nn.Module, teacher: nn.Module | None, images: Normalisation | None
) -> nn.Module:
    """The student with what its method makes of a teacher, but for mean maps, which need images."""
    match config.method:
        case Method.FINE_TUNE:
            return start_from(student, teacher)
        case Method.COPY | Method.DISTILL | Method.DISTILL_UNLABELLED:
            plan = plan_for(config, teacher, student)
            return AttentionTransfer(teacher, student, plan, normalisation=images)
        case Method.FEATURES | Method.FEATURES_UNLABELLED:
            layers = config.feature_layers
            if layers and isinstance(layers[0], tuple):
                layers = dict(layers)
            return FeatureDistillation(teacher, student, layers, normalisation=images)
        case Method.LOGITS | Method.HARD_LOGITS:
            hard = config.method is Method.HARD_LOGITS
            return LogitDistillation(teacher, student, hard=hard, normalisation=images)
        case Method.DISTILLATION_TOKEN:
            return DistillationToken(teacher, student, normalisation=images)
        case Method.SCRATCH | Method.MEAN_MAPS:
            return student
    return config.pretext(student, teacher, images)


def reference_images(config: RunConfig) -> Iterator[torch.Tensor]:
    """Batches of the training images whose mean map is copied, as evaluation sees images."""
    if is_generated(config.data):
        images = maker(config.data)(split=config.training_split, size=config.data_size, seed=config.seed)
    else:
        images = held_out(config, config.training_split)
    # the first of those that `training_images` draws
    number = min(config.reference_images, len(images), config.data_size or len(images))
    chosen = draw(len(images), number, config.seed, f"{config.data} reference")
    for batch in torch.as_tensor(chosen).split(50):
        yield images.take(batch.tolist())[0]


def with_detector(config: RunConfig, model: nn.Module, classes: int) -> nn.Module:
    """The detector of a run on its ViT or pair; of a run that classifies, the model itself."""
    if not config.detects:
        return model
    return DETECTORS[config.detector](model, classes, SIZES[config.detector_sizes])


def plan_for(config: RunConfig, teacher: VisionTransformer | Eva, student: VisionTransformer | Eva) -> Plan:
    """The run's plan; a student that only pools otherwise than its teacher is no mismatch, as pooling comes
    after the last map, and in the published code."""
    only_pooling = set(differences(teacher, student)) == {"pooling"}
    return replace(config.plan, mismatched=True) if only_pooling else config.plan


def teacher_architecture(config: RunConfig) -> Architecture | None:
    """What a run's teacher is built like, where that is known without its weights."""
    if config.teacher in (None, UNTRAINED):
        return None
    if not is_file(config.teacher):
        return Architecture(config.teacher)
    path = Path(config.teacher)
    header = read_header(path) if path.is_file() and path.suffix == ".safetensors" else {}
    if "architecture" not in header or config.teacher_architecture is not None:
        return None
    return Architecture.read(header["architecture"])


def check_fits(config: RunConfig) -> None:
    """Raise what `build` would for a teacher that does not fit, as far as that is known without weights."""
    if config.method.reads_logits and not says_classes(config.teacher):
        raise ValueError(f"{config.method} needs a teacher of these classes: a run of fine-tune")
    native = teacher_architecture(config)
    if native is None or config.method.reads_logits:  # any two classifiers fit
        return
    check_image_size(native, size := teacher_size(config))
    teacher, student = on_meta(headless(native, size)), config.skeleton(2)
    if config.method.transfers:
        pair_up(teacher, student, plan_for(config, teacher, student))
    elif config.method is Method.MEAN_MAPS:  # whatever else the student is made of
        pair_up(teacher, student, Plan(mismatched=True))
    else:
        with without_weights():
            joined(config, student, teacher, IMAGENET)


def teacher_size(config: RunConfig) -> int | None:
    """Pixels a side of the teacher's images; None: of images that come as they are, its own."""
    sized = config.augmentation is not None or config.detects
    return config.teacher_image_size or (image_size(config) if sized else None)


def says_classes(teacher: str) -> bool:
    """Whether a teacher is a file that a run on labels has left."""
    path = Path(teacher)
    return path.suffix == ".safetensors" and path.is_file() and bool(read_header(path).get("classes"))


def start_from(student: VisionTransformer | Eva, teacher: VisionTransformer | Eva) -> VisionTransformer | Eva:
    """Give `student` the teacher's weights, but for its new head and, where it pools otherwise, its norm."""
    weights = {name: value for name, value in teacher.state_dict().items() if not name.startswith("head.")}
    try:
        missing, unexpected = student.load_state_dict(weights, strict=False)
    except RuntimeError as error:  # torch names every shape that differs
        raise ValueError(f"the student cannot start from these weights: {error}") from error
    if wrong := [name for name in (*missing, *unexpected) if not name.startswith(AFTER_THE_MAPS)]:
        raise ValueError(f"the student cannot start from these weights: {', '.join(wrong)} differ")
    return student


def with_student(model: nn.Module, student: nn.Module) -> nn.Module:
    """A trained model with another student in it, such as the averaged one."""
    if not isinstance(model, Pair):
        return student
    kept = {id(teacher): teacher for teacher in model.teachers}
    return copy.deepcopy(model, {**kept, id(model.student): student})


def result_of(config: RunConfig, model: nn.Module) -> nn.Module:
    """What is kept of a trained model: the student, with what it needs of its teacher, or the ViT."""
    if config.method.contrasts:
        return model.result
    if config.method.hides_patches:
        return student_of(model).vit
    return model if isinstance(model, Pair) and model.needs_teacher else student_of(model)
