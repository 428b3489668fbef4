"""What a run is put together from, made from its config: images, teacher, the model to train, its loss."""

import copy
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from atlib._util import require_known
from atlib.checkpoint import read_header
from atlib.data import glyphs
from atlib.data.catalogue import CATALOGUE
from atlib.data.images import Images, draw, load
from atlib.data.rng import seed_for
from atlib.data.transforms import Augmentation
from atlib.plan import Plan
from atlib.run.config import BUILT_IN, COCO, PRETRAINING, RunConfig
from atlib.student import differences
from atlib.train import pretrain
from atlib.train.objectives import Loss, student_loss
from atlib.transfer import AttentionTransfer
from atlib.vit import Architecture

LOSSES: dict[str, Loss] = {"retrieval": pretrain.retrieval_loss, "mae": pretrain.mae_loss}
# images of the built-in world, for students and for pre-training: the central experiment's numbers
LABELLED, UNLABELLED = (1000, 40_000)
HELD_OUT = {"validation": 2000, "test": 4000}  # likewise
COCO_KNOWN = (118_287, 80)  # images of train2017, 1,021 of them without objects, and classes
# Fields of a run, and arguments of `held_out_images`, that say how data are read.
READING = ("data_path", "image_column", "label_column", "on_corrupt", "workers")


class Built(NamedTuple):
    """A model to train. student: the architecture of what is kept; teacher: the teacher's, if any."""

    model: nn.Module
    student: Architecture
    teacher: Architecture | None


def loss_of(config: RunConfig) -> Loss:
    """What a run trains on: labels or objects (with what is distilled), or a pre-text."""
    if config.heads is not None:
        from atlib.detection.detector import detection_loss  # other runs do not need torchvision's detectors

        return detection_loss
    return LOSSES.get(config.method, student_loss)


def training_images(config: RunConfig):
    """The images that a run trains on. Raises what `images.load`, `photos.open_photos` and `coco_images`
    raise."""
    if config.heads is not None:
        return _scenes(config)
    if config.data != BUILT_IN:
        return _photographs(config)
    if config.method not in PRETRAINING:
        return load(BUILT_IN, split="train", size=known_size(config)[0], seed=config.seed)
    drawn = glyphs.generate("unlabelled", known_size(config)[0], config.seed)
    if config.method == "retrieval":
        return pretrain.retrieval_images(drawn)
    return Images(torch.from_numpy(drawn.images), torch.from_numpy(drawn.shape))


def held_out_images(
    data: str,
    split: str,
    augmentation: Augmentation | None = None,
    data_path: str | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
    on_corrupt: str = "raise",
    workers: int = 0,
):
    """A split of a data set, treated as in evaluation. on_corrupt="skip" leaves out what cannot be decoded,
    and decodes everything once to know. Raises `ValueError` for another word than "raise" or "skip"."""
    require_known("on_corrupt", on_corrupt, ("raise", "skip"))
    if data == BUILT_IN:
        return load(BUILT_IN, split=split, size=HELD_OUT.get(split))
    # Imported here: `datasets` takes seconds, and the built-in world does not need it.
    from atlib.data.photos import open_photos

    columns = {"image_column": image_column, "label_column": label_column}
    how = {"augmentation": augmentation, "train": False, "workers": workers}
    photos = open_photos(data, path=data_path, split=split, **columns, **how)
    return photos.readable() if on_corrupt == "skip" else photos


def coco_images(
    folder: str | None,
    split: str,
    size: int,
    *,
    jitter: tuple[float, float] | None = None,
    masks: bool = True,
    workers: int = 0,
):
    """A split of a folder of COCO's form, in squares of `size` pixels: images in FOLDER/SPLIT, what is in
    them in FOLDER/annotations/instances_SPLIT.json. jitter, masks, workers: as in
    `atlib.detection.coco.CocoObjects`; without masks nobody knows which objects COCO counts as small.

    Raises `ValueError` without a folder and without pycocotools, and what `CocoObjects` raises.
    """
    if folder is None:
        raise ValueError(
            f"data {COCO!r} needs data_path, a folder that you have, with the folder {split} of images and"
            f" the file annotations/instances_{split}.json, as https://cocodataset.org gives them:"
            " --data_path FOLDER"
        )
    if find_spec("pycocotools") is None:
        raise ValueError(
            f"data {COCO!r} needs pycocotools, which reads masks and measures precision: pip install"
            " 'attention-transfer[detection]'"
        )
    from atlib.detection.coco import CocoObjects

    images, file = Path(folder) / split, Path(folder) / "annotations" / f"instances_{split}.json"
    return CocoObjects(images, file, size=size, jitter=jitter, masks=masks, workers=workers)


def image_size(config: RunConfig) -> int:
    """Pixels a side of the images that a run's model takes."""
    if config.augmentation is not None:
        return config.augmentation.image_size
    return config.skeleton(2).patch_embed.img_size[0]


def preparation_of(path: str | Path) -> tuple[bool, Augmentation | None]:
    """Whether a file of weights says how images are prepared for it, and how: None where they are taken as
    they are.

    Raises `OSError` naming a file that cannot be read, or that says something else.
    """
    header = read_header(path)
    said = header.get("augmentation")
    try:
        return "augmentation" in header, None if said is None else Augmentation(**said)
    except (TypeError, ValueError) as error:
        raise OSError(
            f"{path} does not say how its images are prepared ({type(error).__name__}: {error}); it was left"
            " as it is"
        ) from error


def known_size(config: RunConfig) -> tuple[int, int] | None:
    """(training images, outputs of the model) of a run, None where the data must be opened to know, as
    those of a folder of COCO's form must, which need not be COCO."""
    if config.data == BUILT_IN:
        outputs = pretrain.RETRIEVAL_OUTPUTS if config.method == "retrieval" else len(glyphs.SHAPES)
        return config.data_size or (UNLABELLED if config.method in PRETRAINING else LABELLED), outputs
    if config.data == COCO:
        published = config.data_path is None and config.training_split == "train2017"
        return (config.data_size or COCO_KNOWN[0], COCO_KNOWN[1]) if published else None
    if config.data not in CATALOGUE:
        return None
    known = CATALOGUE[config.data]
    parts = config.training_split.split("+")
    if not set(parts) <= set(known.images):
        return None
    return config.data_size or sum(known.images[part] for part in parts), known.classes


def _photographs(config: RunConfig):
    from atlib.data.photos import open_photos

    chosen = {
        "path": config.data_path,
        "split": config.training_split,
        "augmentation": config.augmentation,
        "train": True,
        "on_corrupt": config.on_corrupt,
        "image_column": config.image_column,
        "label_column": config.label_column,
    }
    if config.streaming:
        from atlib.data.stream import open_stream

        return open_stream(config.data, count=config.data_size, **chosen)
    photos = open_photos(config.data, **chosen)
    if config.data_size is None:
        return photos
    return photos.select(draw(len(photos), config.data_size, config.seed, f"{config.data} train"))


def _scenes(config: RunConfig):
    images = coco_images(
        config.data_path,
        config.training_split,
        image_size(config),
        jitter=config.jitter,
        masks=config.heads == "mask-rcnn",
    )
    if config.data_size is None:
        return images
    return images.select(draw(len(images), config.data_size, config.seed, f"{COCO} {config.training_split}"))


def outputs_for(config: RunConfig, images) -> int:
    """How many outputs a model for these images has: their classes, or the numbers a pre-text regresses."""
    if config.method == "retrieval":
        return images.targets[0].numel()
    if config.heads is not None:
        return len(images.classes)
    return len(images.classes) or int(images.targets.max()) + 1


def build(config: RunConfig, outputs: int) -> Built:
    """The untrained model of a run; the seed decides its first weights.

    Raises `ValueError` for a teacher that does not fit, and what `atlib.teachers.load.load_teacher` raises
    for one that cannot be read.
    """
    teacher = None
    if config.teacher is not None:
        from atlib.teachers.load import load_teacher

        known = config.augmentation is not None or config.heads is not None
        size = image_size(config) if known else None
        told = {"heads": config.teacher_heads, "architecture": config.teacher_architecture}
        teacher = load_teacher(config.teacher, image_size=size, **told)
    architecture = config.architecture(outputs)
    # What is pre-trained with a seed and what learns from it are independent.
    torch.manual_seed(seed_for(config.seed, "teacher" if config.method in PRETRAINING else "student"))
    model: nn.Module = architecture.build()
    match config.method:
        case "mae":
            model = config.auto_encoder(model)
        case "fine-tune":
            model = start_from(model, teacher.vit)
        case "copy" | "distill":
            model = AttentionTransfer(teacher.vit, model, plan_for(config, teacher.vit, model))
    paired = isinstance(model, AttentionTransfer)
    model = with_heads(config, model, outputs)
    return Built(model, architecture, teacher.architecture if paired else None)


def with_heads(config: RunConfig, model: nn.Module, classes: int) -> nn.Module:
    """The detector of a run on its ViT or pair, with first weights; of a run that classifies, the model
    itself."""
    if config.heads is None:
        return model
    from atlib.detection.detector import DETECTORS, SIZES

    return DETECTORS[config.heads](model, classes, SIZES[config.head_sizes])


def plan_for(config: RunConfig, teacher: VisionTransformer | Eva, student: VisionTransformer | Eva) -> Plan:
    """The run's plan; a student that differs from its teacher in nothing but how it pools at the end is no
    mismatch.

    The published code pairs a student that averages its patches with MAE's weights, which timm reads with a
    class token. Pooling comes after the last map, so what is transferred does not depend on it. Any other
    difference must be asked for, with `plan.mismatched` (arXiv 2605.07191).
    """
    only_pooling = set(differences(teacher, student)) == {"pooling"}
    return replace(config.plan, mismatched=True) if only_pooling else config.plan


def start_from(student: VisionTransformer | Eva, teacher: VisionTransformer | Eva) -> VisionTransformer | Eva:
    """Give `student` the teacher's weights, except for its new class head and, where it pools otherwise, the
    norm before that head.

    Raises `ValueError` naming the weights that do not fit.
    """
    own = student.state_dict()
    weights = {name: value for name, value in teacher.state_dict().items() if not name.startswith("head.")}
    unfit = [
        f"{name} is {tuple(value.shape)} in the teacher, {tuple(own[name].shape)} in the student"
        for name, value in weights.items()
        if name in own and own[name].shape != value.shape
    ]
    if unfit:
        more = f"; and {len(unfit) - 3} more" if len(unfit) > 3 else ""
        raise ValueError(
            f"the student cannot start from this teacher: {'; '.join(unfit[:3])}{more}. Choose the teacher's"
            f" model with the setting model, or its size, such as model.embed_dim={teacher.embed_dim}"
        )
    missing, unused = student.load_state_dict(weights, strict=False)
    wrong = [name for name in (*missing, *unused) if name.split(".")[0] not in ("head", "norm", "fc_norm")]
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise ValueError(
            "the student cannot start from this teacher, it is built otherwise:"
            f" {', '.join(wrong[:5])}{more}; choose the teacher's model with the setting model"
        )
    return student


def with_student(model: nn.Module, student: nn.Module) -> nn.Module:
    """A trained model with another student in it, such as the averaged one."""
    if not isinstance(model, AttentionTransfer):
        return student
    return copy.deepcopy(model, {id(model.teacher): model.teacher, id(model.student): student})


def result_of(config: RunConfig, model: nn.Module) -> nn.Module:
    """What is kept of a trained model: after Distill the student, after Copy both, after MAE the encoder."""
    if config.method == "mae":
        return model.vit
    return model.student if config.method == "distill" else model
