"""The studies of the book, beside the central experiment that they start from."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from timm.layers import Attention
from timm.models.cait import Cait, TalkingHeadAttn
from timm.models.resnet import BasicBlock, ResNet
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from atbook.lab.augmented import AUGMENTATION
from atbook.lab.bits import BITS
from atbook.lab.controls import CONTROLS, partly_labelled, predictions
from atbook.lab.finer import FINER_STUDY
from atbook.lab.linear import LINEAR
from atbook.lab.mosaics import MOSAICS
from atbook.lab.pointing import POINTING
from atbook.lab.pretraining_methods import PRETRAINING_METHODS, PRETRAINING_METHODS_MATCH
from atbook.lab.scales import (
    ALL_RATES,
    AXES,
    COLOUR,
    GATE,
    START,
    UNTIL_LEARNED,
    CifarScale,
    GlyphScale,
    Schooling,
    painter,
)
from atbook.lab.study import CENTRAL as CENTRAL  # the study that all of these start from
from atbook.lab.study import (
    Sources,
    Variant,
    again,
    by,
    fine_tune,
    pair,
    scale_of,
    scratch,
    study,
    untrained_maps,
    with_new_head,
)
from atbook.lab.tuning import Ladder, Range
from atbook.worlds import glyph_images, glyphs
from atbook.worlds.pretext import unpainted
from atfamily.attndistill import AttnDistill, pool_heads, row_squared_error
from atfamily.cait import CaitTransfer
from atfamily.depth import (
    fixup,
    frozen_factors,
    layer_scale,
    one_scalar,
    published_start,
    rezero,
    skip_init,
    t_fixup,
    uniform_layer_scale,
)
from atfamily.distillation_token import DistillationToken, small_convnet, two_class_tokens_loss
from atfamily.distilled_mae import (
    DistilledHiddenMae,
    DistilledMae,
    Match,
    centred_squared_error,
    cross_entropy_of_maps,
    distilled_mae_loss,
    squared_error,
)
from atfamily.late_class import LateClassViT
from atfamily.layer_reserve import keep_first
from atfamily.locality import localise_attention, shift_patches
from atfamily.measures.subsets import long_tail
from atfamily.patch_conv import PatchConvNet, PoolTransfer, with_attention_pool
from atfamily.resmlp import StaticMapDistill, copy_static_maps, mean_patch_maps, resmlp
from atfamily.similarity import CompRess, SimilarityDistillation
from atlib.attention_transfer import AttentionTransfer
from atlib.baselines import FeatureDistillation, LogitDistillation, MeanMapCopy, StoredMaps, one_group
from atlib.data import Images
from atlib.mae import mae_loss
from atlib.objectives import Loss
from atlib.plan import ROWS, Plan
from atlib.vit import PRESETS

FIND, WORLDS = ("find",), ("find", "match")


# --- Which pre-training, and which half of it: features or routing ---

# Taught on other images than the students': dark glyphs in coloured cells.
INVERTED = Schooling("inverted", world=glyphs.World(rendering="inverted"))


def _mix(routing: bool, sources: Sources) -> nn.Module:
    """A teacher's weights, with maps of the central teacher, or of an untrained one."""
    student = with_new_head(sources.teacher(), sources)
    if routing:
        return AttentionTransfer(sources.central_teacher(), student, Plan())
    return untrained_maps(sources, student)


# Weights of one teacher under maps of another need other steps than fine-tuning's, up to 16 times as large.
# All rates are tried: a search that ends where a neighbour is hardly better stays short of fine-tuning's.
_OWN_RATE = Ladder("lr", (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2))


def _mixed(features: str, routing: str) -> Variant:
    return Variant(
        f"{features} features, {routing} routing",
        partial(_mix, routing != "useless"),
        "fine-tune",
        trials=_OWN_RATE,
        needs=() if routing == "useless" else ("central teacher",),
        schooling=None if features == "useful" else COLOUR,
        twin="routing" if routing == "a twin's" else None,  # routing without its message
    )


PRETRAINING = study(
    "pretraining",
    # all that a teacher can give
    *(
        variant
        for school in (COLOUR, INVERTED)
        for variant in (
            Variant(f"{school.name}, fine-tune", fine_tune, "fine-tune", trials=_OWN_RATE, schooling=school),
            Variant(f"{school.name}, copy", by(), schooling=school),
            Variant(f"{school.name}, distill", by(how="distill"), "distill", schooling=school),
        )
    ),
    *(_mixed(*halves) for halves in product(("useful", "useless"), ("useful", "useless"))),
    _mixed("useful", "a twin's"),
    _mixed("useless", "a twin's"),
)


# --- How many labels ---


def _with_labels(steps: int, numbers: Sequence[int], *methods: str) -> list[Variant]:
    return [
        replace(
            CENTRAL.variant(method),
            name=f"{method}, {number} labels",
            like=method,
            changes={"steps": steps},
            labels=number,
        )
        for method in methods
        for number in numbers
    ]


LABEL_CURVES = study(
    "labels", *_with_labels(500, (250, 4000, 32_000), "scratch", "copy-routing-twin", "copy", "fine-tune")
)

# In Match a student from scratch does not learn in 500 steps, from any number of labels, at the rate that
# 1,000 labels choose. With more steps each variant has a search of its own, as wide for all methods. Maps get
# 1,000 labels alone: the question is how many labels scratch needs to reach what they reach.
# Find has the same variants.
LONGER_LABEL_CURVES = study(
    "labels-longer",
    *(
        replace(variant, like=None, trials=Range(AXES, {"lr": 1e-3, "weight_decay": 0.1}, {}))
        for variant in (
            *_with_labels(2000, (1000, 4000, 32_000), "scratch"),
            *_with_labels(2000, (1000,), "copy-routing-twin", "copy", "fine-tune"),
        )
    ),
)


# --- Twins of deeper networks: do the layers behind the look let a message in? ---

DEEPER = {
    depth: Schooling(f"retrieval-{word}-layers", world=None, model={"depth": depth}, gate=GATE)
    for depth, word in ((6, "six"), (8, "eight"))
}

TWINS_BY_DEPTH = study(
    "twins-by-depth",
    *(
        replace(
            CENTRAL.variant(method),
            name=f"{depth} layers, {method}",
            changes={"weight_decay": START["weight_decay"]},
            trials=Range(AXES, START, {}) if method in ("copy", "copy-routing-twin") else ALL_RATES,
            schooling=None if method == "scratch" else school,
            student={"depth": depth},
        )
        for depth, school in DEEPER.items()
        for method in ("scratch", "copy", "copy-routing-twin", "copy-message-twin")
    ),
)


# --- Teachers and students of three sizes; those of the central experiment are 64 wide ---

_WIDTHS = {
    width: Schooling(f"retrieval-width-{width}", world=None, model={"embed_dim": width}, gate=GATE)
    for width in (48, 96)  # 32 wide, teachers have not learned Match in 6,000 steps
}

SIZES = study(
    "sizes",
    *(
        Variant(
            f"width {width}, {method}",
            scratch if method == "scratch" else by(),
            None,
            {"weight_decay": START["weight_decay"]},
            trials=UNTIL_LEARNED if method == "scratch" else Range(AXES, START, {}),
            schooling=None if method == "scratch" else school,
            student={"embed_dim": width},
        )
        for width, school in _WIDTHS.items()
        for method in ("scratch", "copy")
    ),
)


# --- One map for all images ---

# Of other networks than ViTs, and of the ViTs they are compared with: the recipe chosen for scratch, at one
# of these rates.
_ANY_RATE = Ladder("lr", (1e-3, 2e-3, 4e-3, 8e-3))


def _images(sources: Sources) -> Tensor:
    """What mean maps are estimated from: images of the variant's world."""
    images = sources.unlabelled()
    return images.take(range(len(images)))[0]


def _mean_map(sources: Sources, group_of: Callable = one_group, groups: int = 1) -> nn.Module:
    """A ViT with the teacher's mean map, or that of the image's group, in every head."""
    return MeanMapCopy(sources.teacher(), sources.student(), _images(sources), group_of, groups)


def _even_map(sources: Sources) -> nn.Module:
    """A ViT in which every token takes the mean of all tokens: one map for all images that knows nothing."""
    student = sources.student()
    tokens, heads = student.pos_embed.shape[1], student.blocks[0].attn.num_heads
    return StoredMaps(student, [torch.full((1, heads, tokens, tokens), 1 / tokens)] * len(student.blocks))


def _resmlp(sources: Sources, mixing: str = "linear", pooling: str = "average") -> nn.Module:
    """A ResMLP as deep and wide as the students, and with their patches."""
    vit = sources.scale.student.build()
    sources.seed_student()
    return resmlp(
        vit.patch_embed.img_size[0],
        vit.patch_embed.patch_size[0],
        vit.embed_dim,
        len(vit.blocks),
        vit.num_classes,
        mixing=mixing,
        pooling=pooling,
    )


def _token_with_even_shares(sources: Sources) -> nn.Module:
    """A ResMLP whose class token starts to gather all patches alike, where torch would draw its shares with
    random signs."""
    model = _resmlp(sources, pooling="class")
    for block in model.norm[0].blocks:
        nn.init.constant_(block.shares.weight, 1 / block.shares.in_features)
        nn.init.zeros_(block.shares.bias)
    return model


def _taught_resmlp(put: Callable, sources: Sources) -> nn.Module:
    return put(_resmlp(sources), mean_patch_maps(sources.teacher(), _images(sources)))


def _even_resmlp(sources: Sources) -> nn.Module:
    model, patches = _resmlp(sources), sources.scale.student.build().patch_embed.num_patches
    return copy_static_maps(model, [torch.full((patches, patches), 1 / patches)] * len(model.blocks))


# Networks whose maps are the same for all images; without any, what pooling does alone. The even map is the
# control for the teacher's mean: whether it helps because of the teacher, or because nothing is learned.
STATIC = study(
    "static-routing",
    *(
        Variant(name, build, "scratch", {"transfer_weight": 3.0}, _ANY_RATE)
        for name, build in {
            "vit": scratch,
            "vit, mean map copied": _mean_map,
            "vit, even map copied": _even_map,
            "resmlp": _resmlp,
            "resmlp, no mixing": partial(_resmlp, mixing="none"),
            # what the paper's ablation has in place of one matrix
            "resmlp, MLP over patches": partial(_resmlp, mixing="mlp"),
            "resmlp, convolution": partial(_resmlp, mixing="conv"),
            "resmlp, depthwise convolution": partial(_resmlp, mixing="depthwise"),
            "resmlp, separable convolution": partial(_resmlp, mixing="separable"),
            "resmlp, read by a token": partial(_resmlp, pooling="class"),
            "resmlp, read by a token that starts even": _token_with_even_shares,
            "resmlp, mean map copied": partial(_taught_resmlp, copy_static_maps),
            "resmlp, even map copied": _even_resmlp,
            "resmlp, mean map distilled": partial(_taught_resmlp, StaticMapDistill),
        }.items()
    ),
)


# --- One row of attention, in a network of convolutions ---


def _patch_conv(sources: Sources, pool: str = "attention") -> nn.Module:
    """A PatchConvNet as deep and wide as the students, and with their patches."""
    vit = sources.scale.student.build()
    sources.seed_student()
    return PatchConvNet(
        vit.num_classes, vit.embed_dim, len(vit.blocks), vit.patch_embed.patch_size[0], pool, init_values=0.1
    )


def _resnet(pool: str, sources: Sources) -> nn.Module:
    """A narrow ResNet of four blocks with another pool; on the students' images its patch grid is theirs."""
    sources.seed_student()
    network = ResNet(BasicBlock, (1, 1, 1, 1), channels=(24, 48, 96, 96), output_stride=8)
    return with_attention_pool(network, sources.scale.student.build().num_classes, pool, init_values=0.1)


def _pooled(copy: bool, pool: str, sources: Sources) -> nn.Module:
    teacher = sources.teacher()
    # As many as heads: the geometric mean of their rows. AttnDistill's 10 would leave these small ViTs' rows
    # with little more than half of their mass on the named glyph.
    temperature = teacher.blocks[0].attn.num_heads
    return PoolTransfer(teacher, _patch_conv(sources, pool), copy=copy, temperature=temperature)


ONE_SOFTMAX = study(
    "one-softmax",
    *(
        Variant(name, build, "scratch", {"transfer_weight": 3.0}, _ANY_RATE)
        for name, build in {
            "average": partial(_patch_conv, pool="average"),
            "attention": _patch_conv,
            "row copied": partial(_pooled, True, "attention"),
            "row distilled": partial(_pooled, False, "attention"),
            "average, row copied": partial(_pooled, True, "average"),
            "a query for each class": partial(_patch_conv, pool="per class"),
            "ResNet, average": partial(_resnet, "average"),
            "ResNet, attention": partial(_resnet, "attention"),
        }.items()
    ),
)


# --- Objects that lie across patches: what a tokeniser and an attention for few labels do about it ---

ACROSS = glyphs.World(offset=glyphs.CELL // 2)
ACROSS_TEACHER = Schooling("offset", world=ACROSS, changes={"steps": 3000})
_RATES = Ladder("lr", (1e-3, 4e-3, 1.6e-2))


# What is done to a standard student.
_MADE_LOCAL: dict[str, tuple[Callable[[VisionTransformer], VisionTransformer], ...]] = {
    "standard": (),
    "local": (shift_patches, localise_attention),
    "shifted patches": (shift_patches,),
    "local attention": (localise_attention,),
}


def _in_locality(method: str, kind: str, sources: Sources) -> nn.Module:
    """A student with shifted patches (SPT), local attention (LSA), both or neither, on its own, or beside the
    teacher of its world."""
    student = sources.student()
    for change in _MADE_LOCAL[kind]:
        student = change(student)
    if method == "scratch":
        return student
    plan = Plan(how=method, mismatched=kind != "standard")
    return AttentionTransfer(sources.teacher(), student, plan)


LOCALITY = study(
    "locality",
    *(
        Variant(
            f"{student}, {method}, {labels} labels",
            partial(_in_locality, method, student),
            method,
            trials=_RATES,
            schooling=None if method == "scratch" else ACROSS_TEACHER,
            labels=labels,
            world=ACROSS,
        )
        for method, labels, student in (
            *product(("scratch", "copy"), (250, 1000, 4000), ("standard", "local")),
            *product(("scratch",), (1000,), ("shifted patches", "local attention")),
        )
    ),
)


# --- Imbalanced labels ---

IMBALANCE = 50.0  # the first class has 50 times as many images as the last


def _imbalanced(scale: GlyphScale | CifarScale, seed: int) -> Images:
    """Imbalanced labels of four times as many drawn: about as many as the scale's balanced ones (of all,
    where it takes all)."""
    return long_tail(scale.labelled(seed, scale.labels and 4 * scale.labels), IMBALANCE, seed)


LONG_TAIL = study(
    "long-tail",
    *(
        replace(CENTRAL.variant(method), like=method, images=_imbalanced)
        for method in ("scratch", "fine-tune", "copy", "distill")
    ),
)


# --- A teacher's native components, in the student or not ---


def _matched_or_not(
    name: str, component: Mapping, needs: Mapping, trials: Sequence[Mapping] = ()
) -> tuple[Variant, ...]:
    """A student with a component, from scratch, and its teacher copied into that student and into a standard
    one. component: constructor arguments; needs: what a standard student's plan needs; with trials, each by a
    search of its own."""
    school = Schooling(name.replace(" ", "-"), model=component)
    floor, copied = (None, None) if trials else ("scratch", "copy")
    standard = by(mismatched=True, **needs)
    return (
        Variant(f"{name}, scratch", scratch, floor, trials=trials, student=component),
        Variant(f"{name}, copy to matched", by(), copied, trials=trials, student=component, schooling=school),
        Variant(f"{name}, copy to standard", standard, copied, trials=trials, schooling=school),
    )


COMPONENT_STUDY = study(
    "components",
    *_matched_or_not("registers", {"reg_tokens": 4}, {"unequal_prefix": "drop"}),
    *_matched_or_not("average pooling", {"global_pool": "avg"}, {}),
)

# For one of them the least of the common range was the best.
_LITTLE_DECAY = Range(AXES | {"weight_decay": (0.0, 0.003, *AXES["weight_decay"])}, START, {}, step=0.0)
# What plain DINOv2 and CLIP differ by, which have neither registers nor another pooling.
NATIVE_STUDY = study(
    "native-components",
    *_matched_or_not(
        "layer scale", {"init_values": published_start(PRESETS["glyphs"]["depth"])}, {}, _LITTLE_DECAY
    ),
    *_matched_or_not("norm before the blocks", {"pre_norm": True}, {}, _LITTLE_DECAY),
)


# --- A pool of ordinary models, for the line that effective robustness is measured from ---

_LONGEST = Variant("8000 labels, 1000 steps", scratch, "scratch", {"steps": 1000}, labels=8000)

POOL = study(
    "pool",
    *(Variant(f"{labels} labels", scratch, "scratch", labels=labels) for labels in (250, 500, 2000, 4000)),
    Variant("125 steps", scratch, "scratch", {"steps": 125}),
    Variant("250 steps", scratch, "scratch", {"steps": 250}),
    _LONGEST,
    replace(_LONGEST, name="8000 labels, step 500 of 1000", stop_at=500),
    Variant("narrow", scratch, "scratch", student={"embed_dim": 32}),
    Variant("wide", scratch, "scratch", student={"embed_dim": 96}),
)


# --- Which layers, which heads; how strongly ---


def _pair_in_layers(how: str, end: str, number: int, sources: Sources) -> nn.Module:
    depth = len(scale_of(sources.place).student.build().blocks)
    layers = range(number) if end == "first" else range(depth - number, depth)
    return pair(Plan(how=how, layers=layers), sources)


def _weights(*values: float) -> Ladder:
    """Weights of a loss that lie far apart, and beyond them as far."""
    return Ladder("transfer_weight", values, factor=10.0)


LAYERS = study(
    "layers",
    *(
        Variant(f"{how} {end} {number}", partial(_pair_in_layers, how, end, number), how)
        for how, end, number in product(("copy", "distill"), ("first", "last"), (1, 2, 3))
    ),
    *(Variant(f"copy heads {n}", by(heads=range(n))) for n in (1, 2, 3)),
)

DISTILLATION = study(
    "distillation",
    # λ = 3 is the recipe's own: the central experiment has its runs.
    *(
        Variant(f"weight {weight:g}", by(how="distill"), "distill", {"transfer_weight": weight})
        for weight in (0.3, 1.0, 10.0, 30.0, 100.0)
    ),
)


# --- Features and predictions: what else can go from a teacher to a student ---


def _into_another(sources: Sources) -> nn.Module:
    """The teacher's maps, copied into a student that starts from another teacher's weights."""
    student = with_new_head(sources.another_teacher(), sources)
    return AttentionTransfer(sources.teacher(), student, Plan())


def _features(sources: Sources) -> nn.Module:
    return FeatureDistillation(sources.teacher(), sources.student())


# Losses of other sizes than that of maps: their weight and the rate are searched together.
_SEARCHED = Range(
    {"lr": AXES["lr"], "transfer_weight": (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)},
    {"lr": START["lr"], "transfer_weight": 1.0},
    {},
)


def _predicted(form: str, task: float, transfer: float) -> Variant:
    return Variant(
        f"{form} predictions",
        partial(predictions, form == "hard"),
        "scratch",
        {"task_weight": task, "transfer_weight": transfer},
        Range(AXES, START, {}),
        needs=("fine-tuned",),
    )


FAMILY = study(
    "family",
    Variant("features", _features, "distill", trials=_SEARCHED),
    Variant("distilled queries", by("q", "distill"), "distill", trials=_SEARCHED),
    _predicted("soft", 0.9, 0.1),
    _predicted("hard", 0.5, 0.5),
    Variant("copy into another teacher's weights", _into_another, "fine-tune", needs=("another teacher",)),
    # of scratch the central experiment has three a seed
    *(
        Variant(f"{method} again", partial(again, CENTRAL.variant(method).build), method)
        for method in ("fine-tune", "copy", "distill")
    ),
)


# --- What in a map matters ---


AVERAGES = study(
    "averages",
    Variant("copy mean of examples", _mean_map),
    *(Variant(f"copy mean of {over}", by(average=over)) for over in ("layers", "heads", "queries")),
    Variant("copy mean of cell", partial(_mean_map, group_of=glyphs.marked_cell, groups=glyphs.GRID**2)),
)


# --- Teacher and student that differ ---

_TWO_HEADS, _WIDE, _SHALLOW = {"num_heads": 2}, {"embed_dim": 128}, {"depth": 2}


def _attndistill(name: str, **options) -> Variant:
    """It as published, or with one thing different."""
    build = partial(_build_attndistill, options)
    trials = _weights(0.1, 1.0, 10.0)
    return Variant(f"two heads, {name}", build, "distill", student=_TWO_HEADS, trials=trials)


def _build_attndistill(options: Mapping, sources: Sources) -> nn.Module:
    return AttnDistill(sources.teacher(), sources.student(), **options)


def _two_heads(how: str, remedy: str, trials: Sequence[Mapping] = ()) -> Variant:
    build = by(how=how, unequal_heads=remedy)
    return Variant(f"two heads, {how} {remedy}", build, how, student=_TWO_HEADS, trials=trials)


_LAST_LAYERS = {0: 2, 1: 3}  # of four, for a student of two
PAIRS = study(
    "pairs",
    Variant("two heads, scratch", scratch, "scratch", student=_TWO_HEADS),
    _two_heads("copy", "aggregate"),
    _two_heads("copy", "average"),
    _two_heads("distill", "aggregate"),
    _two_heads("distill", "learn", _weights(10.0, 100.0, 1000.0)),
    _attndistill("attndistill"),
    Variant("shallow, scratch", scratch, "scratch", student=_SHALLOW),
    Variant("shallow, copy last layers", by(layers=_LAST_LAYERS), student=_SHALLOW),
    Variant(
        "shallow, distill last layers", by(how="distill", layers=_LAST_LAYERS), "distill", student=_SHALLOW
    ),
    Variant("wide, scratch", scratch, "scratch", student=_WIDE),
    Variant("wide, copy", by(), student=_WIDE),
)

# --- Depth: what keeps branches quiet, and what a copied map does for it ---

# One small grid for all: from what a deep student may need to what a shallow one takes.
_FEW_RATES = Ladder("lr", (5e-4, 2e-3, 8e-3))


def _brief(name: str, build: Callable[[Sources], nn.Module], like: str = "scratch", **options) -> Variant:
    """A variant at a budget at which 24 layers can be afforded."""
    return Variant(name, build, like, {"steps": 400}, _FEW_RATES, **options)


def _of_depth(
    depth: int, build: Callable[[Sources], nn.Module], more: str = "", like: str = "scratch", **options
) -> Variant:
    """A student of 4 layers, as the teacher has, or of more. more: of its name."""
    student = {} if depth == 4 else {"depth": depth}
    return _brief(f"{depth} layers{more}", build, like, **{"student": student} | options)


def _with_factors(factors: Callable[[VisionTransformer], VisionTransformer], sources: Sources) -> nn.Module:
    return factors(sources.student())


def _copy_into_deeper(student: Callable[[Sources], nn.Module], sources: Sources) -> nn.Module:
    """A student whose layers are a multiple of the teacher's: as many neighbours share a teacher's map."""
    teacher, deeper = sources.teacher(), student(sources)
    neighbours = len(deeper.blocks) // len(teacher.blocks)
    layers = {layer: layer // neighbours for layer in range(len(deeper.blocks))}
    # LayerScale, where the student has it, is what the teacher lacks
    return AttentionTransfer(teacher, deeper, Plan(layers=layers, mismatched=True))


def _retrained(sources: Sources) -> nn.Module:
    return frozen_factors(sources.student(), sources.model_of(DEPTH, SCALED))


_scaled = partial(_with_factors, layer_scale)
SCALED = "24 layers, layer scale"
_DEEP = {"depth": 24}
_uniform = partial(uniform_layer_scale, mean=published_start(_DEEP["depth"]))
# LayerScale's rivals in the thesis: one factor a branch, from elsewhere, or other first weights.
RIVALS: dict[str, Callable[[VisionTransformer], VisionTransformer]] = {
    "one scalar": partial(one_scalar, start=published_start(_DEEP["depth"])),
    "rezero": rezero,
    "skip init": skip_init,
    "fixup": fixup,
    "t-fixup": t_fixup,
}

DEPTH = study(
    "depth",
    _of_depth(4, scratch),
    _of_depth(4, _scaled, ", layer scale"),
    _of_depth(4, by(), ", copy", "copy"),
    _of_depth(24, scratch),
    _of_depth(24, _scaled, ", layer scale"),
    *(_of_depth(24, partial(_with_factors, rival), f", {name}") for name, rival in RIVALS.items()),
    _of_depth(24, partial(_copy_into_deeper, scratch), ", copy", "copy"),
    _of_depth(24, partial(_copy_into_deeper, _scaled), ", layer scale, copy", "copy"),
    _of_depth(12, scratch),
    _of_depth(12, _scaled, ", layer scale"),
    _of_depth(12, partial(_copy_into_deeper, scratch), ", copy", "copy"),
    _of_depth(24, partial(_with_factors, partial(layer_scale, start=0.0)), ", layer scale from 0"),
    _of_depth(24, partial(_with_factors, _uniform), ", layer scale, uniform"),
    _of_depth(24, _retrained, ", learned factors, frozen", needs=(SCALED,)),
    _of_depth(24, scratch, ", drop rate 0.1", student=_DEEP | {"drop_path_rate": 0.1}),
)


# --- Class attention: the map in two parts ---


def _cait(sources: Sources, attention: type[nn.Module] = TalkingHeadAttn) -> nn.Module:
    """A CaiT of the student's sizes: its layers for the patches, two more for the class token."""
    sources.seed_student()
    start = published_start(PRESETS["glyphs"]["depth"])
    return Cait(**PRESETS["glyphs"], init_values=start, attn_block=attention)


def _late(insert_at: int, sources: Sources) -> nn.Module:
    """A ViT whose class token joins before layer `insert_at`, counted from 0."""
    sources.seed_student()
    return LateClassViT(insert_at, **PRESETS["glyphs"])


def _teach_cait(patches: str | None, class_rows: str | None, sources: Sources) -> nn.Module:
    return CaitTransfer(sources.teacher(), _cait(sources), patches=patches, class_rows=class_rows)


CLASS_ATTENTION = study(
    "class-attention",
    _brief("late class token, scratch", partial(_late, 2)),
    *(_brief(f"class token before layer {at}, scratch", partial(_late, at)) for at in (0, 1, 3)),
    _brief("cait, scratch", _cait),
    _brief("cait without talking heads, scratch", partial(_cait, attention=Attention)),
    *(
        _brief(f"cait, {how} {part}", partial(_teach_cait, patches, class_rows), how)
        for how in ("copy", "distill")
        for part, patches, class_rows in (
            ("patches", how, None),
            ("class rows", None, how),
            ("both", how, how),
        )
    ),
)


# --- A distillation token: predictions through a token of their own, of images that nobody has labelled ---


def _convnet(sources: Sources) -> nn.Module:
    sources.seed_student()
    return small_convnet(sources.scale.student.build().num_classes)


def _of_convnet(hard: bool, sources: Sources) -> nn.Module:
    return LogitDistillation(sources.model_of(TOKEN, SCHOOLED), sources.student(), hard=hard)


def _token(teacher: str, maps: bool, sources: Sources) -> nn.Module:
    """With maps, these weigh as in the central Distill, whose chosen weight is 10, beside half of the other
    losses."""
    student, beside = sources.student(), None
    if maps:
        plan = Plan(how="distill", unequal_prefix="own", mismatched=True)
        beside = AttentionTransfer(sources.teacher(), student, plan)
    predicting = sources.fine_tuned() if teacher == "ViT" else sources.model_of(TOKEN, teacher)
    return DistillationToken(predicting, student, maps=beside, maps_weight=20.0)


def _two_class_tokens(sources: Sources) -> nn.Module:
    student = sources.student()
    student.set_distilled_training(True)
    return student


_WITH_TOKEN = {"distilled": True}
# A convnet that knows its task: labels of nearly as many images as the ViT's pre-training had.
SCHOOLED = "convnet, 32000 labels"
_HARD, _SOFT = ({"task_weight": task, "transfer_weight": 1 - task} for task in (0.5, 0.9))


# DeiT's published code divides the soft loss by the number of classes, eight here; its equation does not.
_BY_THE_CLASS = _SOFT | {"transfer_weight": _SOFT["transfer_weight"] / 8}


def _long(name: str, build: Callable[[Sources], nn.Module], changes: Mapping = {}, **options) -> Variant:
    """800 steps: with eight unlabelled images beside each labelled one, nothing has begun after 200."""
    changes = {"steps": 800, **changes}
    return Variant(name, build, "scratch", changes, Ladder("lr", (4e-3, 8e-3)), **options)


def _taught_by(
    name: str, build: Callable[[Sources], nn.Module], need: str, weights: Mapping, student: Mapping = {}
) -> Variant:
    """A teacher's predictions: soft or hard for the class token, or hard for a token of their own."""
    return _long(name, build, weights, needs=(need,), student=student, images=partly_labelled)


TOKEN = study(
    "token",
    _long("scratch", scratch),
    _long("two class tokens", _two_class_tokens, student=_WITH_TOKEN, loss=two_class_tokens_loss),
    _taught_by("soft, ViT", partial(predictions, False), "fine-tuned", _SOFT),
    _taught_by("soft by the class, ViT", partial(predictions, False), "fine-tuned", _BY_THE_CLASS),
    _taught_by("hard, ViT", partial(predictions, True), "fine-tuned", _HARD),
    _taught_by("token, ViT", partial(_token, "ViT", False), "fine-tuned", _HARD, _WITH_TOKEN),
    _long(SCHOOLED, _convnet, labels=32000),
    _taught_by("soft, schooled convnet", partial(_of_convnet, False), SCHOOLED, _SOFT),
    _taught_by("hard, schooled convnet", partial(_of_convnet, True), SCHOOLED, _HARD),
    _taught_by("token, schooled convnet", partial(_token, SCHOOLED, False), SCHOOLED, _HARD, _WITH_TOKEN),
    _long("maps", by(how="distill"), {"transfer_weight": 10.0}, images=partly_labelled),
    _taught_by("maps and token, ViT", partial(_token, "ViT", True), "fine-tuned", _HARD, _WITH_TOKEN),
)


# --- Which rows of a map ---

ROW_STUDY = study(
    "rows",
    *(
        Variant(f"{how} {rows} rows", by(how=how, rows=rows), how)
        for how in ("copy", "distill")
        for rows in ROWS
    ),
)


# --- How much of the teacher has to move, for a reader who may keep its weights ---


def _fine_tune_only(part: str | None, sources: Sources) -> nn.Module:
    """The teacher's weights, of which the new head moves, and what has `part` in its name; no part: a frozen
    probe."""
    vit = fine_tune(sources)
    for name, weight in vit.named_parameters():
        weight.requires_grad_(name.startswith("head.") or (part is not None and f".{part}." in name))
    return vit


def _mlp_probe(sources: Sources) -> nn.Module:
    """The teacher's weights, frozen, and a head that can put features together: one hidden layer, twice as
    wide as the class token."""
    vit = _fine_tune_only(None, sources)
    width, classes = vit.embed_dim, vit.num_classes
    vit.head = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, classes))
    return vit


# A new head alone needs less decay than a network does.
_PROBE_AXES = AXES | {"weight_decay": (0.0, 0.001, 0.003, *AXES["weight_decay"])}

_PROBE, _UPHILL = (Range(axes, START, {}, step=0.0) for axes in (_PROBE_AXES, AXES))

PARTLY_TUNED = study(
    "partly-tuned",
    Variant("frozen probe", partial(_fine_tune_only, None), None, trials=_PROBE),
    Variant("frozen MLP probe", _mlp_probe, None, trials=_PROBE),
    Variant("fine-tune attention", partial(_fine_tune_only, "attn"), None, trials=_UPHILL),
)


# --- Distill where only Copy was tried ---


# What AttnDistill's supplement ablates, table 10 (b), (d), (e), (f).
ABLATIONS = {
    "T = 5": {"temperature": 5.0},
    "T = 20": {"temperature": 20.0},
    "max of heads": {"merge": partial(pool_heads, how="max")},
    "min of heads": {"merge": partial(pool_heads, how="min")},
    "mean of heads": {"merge": partial(pool_heads, how="mean")},
    "projector of 1": {"projector_layers": 1},
    "projector of 2": {"projector_layers": 2},
    "projector of 8": {"projector_layers": 8},
    "attention weight 0.01": {"attention_weight": 0.01},
    "attention weight 1": {"attention_weight": 1.0},
    "class token alone": {"attention_weight": 0.0},
    "squared error": {"compare": row_squared_error},
    "weighted by value": {"by_value": True},
}


def _alike(method: type[SimilarityDistillation] | type[CompRess], sources: Sources) -> nn.Module:
    """A queue of as many images as have labels."""
    return method(sources.teacher(), sources.student(), queue=1000)


DISTILLED_TOO = study(
    "distilled-too",
    Variant(
        "distill untrained",
        partial(untrained_maps, plan=Plan(how="distill")),
        "distill",
        trials=_weights(0.3, 3.0, 10.0),
    ),
    *(_attndistill(f"attndistill {ablated}", **options) for ablated, options in ABLATIONS.items()),
    *(
        Variant(
            f"two heads, {name}",
            partial(_alike, method),
            "distill",
            student=_TWO_HEADS,
            trials=_weights(0.1, 1.0, 10.0),
        )
        for name, method in (("seed", SimilarityDistillation), ("compress", CompRess))
    ),
    Variant(
        "two heads, predictions",
        partial(predictions, False),
        "scratch",
        {"task_weight": 0.9, "transfer_weight": 0.1},
        Ladder("lr", (2e-3, 4e-3, 8e-3)),
        student=_TWO_HEADS,
        needs=("fine-tuned",),
    ),
)


# --- Before there are labels: auto-encoders with a teacher; which pre-trained layers ---

# The factor on the attention's loss is the published one, and the same for all that is compared. As many
# steps as fine-tuning has, so that both together are those of "distill-long".
_PAINTING = {"steps": 500, "betas": (0.9, 0.95), "transfer_weight": 1.0}
# One grid for all that is pre-trained by painting.
_PAINTERS_RATE = Ladder("lr", (1e-3, 2e-3, 4e-3, 8e-3))
Central = Callable[[], VisionTransformer]  # gives the central teacher


def _taught_painter(
    layers: Sequence[int] | None, match: Match, mix_heads: bool, vit: VisionTransformer, central: Central
) -> DistilledMae:
    return DistilledMae(central(), painter(vit, central), layers=layers, match=match, mix_heads=mix_heads)


def _with_hidden_states(
    layers: Sequence[int] | None, vit: VisionTransformer, central: Central
) -> DistilledHiddenMae:
    return DistilledHiddenMae(central(), painter(vit, central), layers=layers)


def _unpainted(model: DistilledMae | DistilledHiddenMae, images: Images) -> float:
    return unpainted(model.student, images)


def _painted(name: str, around: Callable, loss: Loss = distilled_mae_loss, unlearned: Callable = _unpainted):
    """An auto-encoder; unless it is alone, it learns from the central teacher of its seed."""
    options = {"changes": _PAINTING, "around": around, "unlearned": unlearned, "again": 1}
    return Schooling(name, 0, glyph_images, loss, **options)


def _distilled_mae(
    name: str, layers: Sequence[int] | None, match: Match, mix_heads: bool = True
) -> Schooling:
    return _painted(name, partial(_taught_painter, layers, match, mix_heads))


_DEPTHS: dict[str, Sequence[int] | None] = {"last layer": None, "all layers": range(4)}
_TARGETS = {
    "logits": squared_error,
    "logits without row means": centred_squared_error,
    "maps": cross_entropy_of_maps,
}
HEAD_BY_HEAD = "maps, all layers, head by head"
# By the variant that is fine-tuned from it: what is distilled, and where.
PAINTERS = {
    "MAE": _painted("mae", painter, mae_loss, unpainted),
    # in all of these heads are mixed, as published (logits in the last layer are that method)
    **{
        f"{target}, {where}": _distilled_mae(f"dmae-{target}-{where}".replace(" ", "-"), layers, match)
        for target, match in _TARGETS.items()
        for where, layers in _DEPTHS.items()
    },
    # the published loss in one lower layer of both
    **{
        f"logits, {word} layer": _distilled_mae(f"dmae-logits-{word}-layer", (layer,), squared_error)
        for layer, word in enumerate(("first", "second", "third"))
    },
    # features in place of attention
    **{
        f"hidden states, {where}": _painted(
            f"dmae-hidden-{where}".replace(" ", "-"), partial(_with_hidden_states, layers)
        )
        for where, layers in _DEPTHS.items()
    },
    # the loss of Distill, at another time
    HEAD_BY_HEAD: _distilled_mae("dmae-maps-head-by-head", range(4), cross_entropy_of_maps, mix_heads=False),
}


def _distill_into(sources: Sources) -> nn.Module:
    """Distill into a student that is pre-trained already."""
    student = with_new_head(sources.teacher(), sources)
    return AttentionTransfer(sources.central_teacher(), student, Plan(how="distill"))


DISTILLED_MAE = study(
    "distilled-mae",
    *(
        Variant(
            name,
            fine_tune,
            "fine-tune",
            trials=_PAINTERS_RATE,
            needs=() if school.around is painter else ("central teacher",),
            schooling=school,
        )
        for name, school in PAINTERS.items()
    ),
    Variant(
        f"{HEAD_BY_HEAD}, then distill",
        _distill_into,
        "distill",
        trials=_PAINTERS_RATE,
        needs=("central teacher",),
        schooling=PAINTERS[HEAD_BY_HEAD],
    ),
)


def _keep_first(number: int, sources: Sources) -> nn.Module:
    return keep_first(sources.teacher(), sources.student(), number)


LAYER_RESERVE = study(
    "layer-reserve",
    *(
        Variant(
            f"first {blocks}, {labels} labels",
            partial(_keep_first, blocks),
            "fine-tune",
            trials=Ladder("lr", (5e-4, 1.4e-3, 4e-3)),  # from what suits fine-tuning to what suits scratch
            labels=labels,
        )
        for labels in (250, 4000)
        for blocks in range(5)
    ),
)


STUDIES = {
    one.name: one
    for one in (
        LABEL_CURVES,
        LONGER_LABEL_CURVES,
        TWINS_BY_DEPTH,
        SIZES,
        LOCALITY,
        DISTILLATION,
        FAMILY,
        LAYERS,
        AVERAGES,
        PAIRS,
        DEPTH,
        CLASS_ATTENTION,
        STATIC,
        ONE_SOFTMAX,
        TOKEN,
        ROW_STUDY,
        PARTLY_TUNED,
        DISTILLED_TOO,
        DISTILLED_MAE,
        LAYER_RESERVE,
        AUGMENTATION,
        BITS,
        CONTROLS,
        MOSAICS,
        FINER_STUDY,
        LINEAR,
        POINTING,
        PRETRAINING_METHODS,
        PRETRAINING_METHODS_MATCH,
        PRETRAINING,
        LONG_TAIL,
        COMPONENT_STUDY,
        NATIVE_STUDY,
        POOL,
    )
}
