"""The studies of the book, beside the central experiment that they start from."""

from collections.abc import Mapping, Sequence
from functools import partial

from torch import nn

from atlib.analysis.subsets import long_tail
from atlib.data import glyphs
from atlib.data.images import Images
from atlib.lab.scales import AXES, START, CifarScale, GlyphScale, Schooling, colour
from atlib.lab.study import CENTRAL as CENTRAL  # the study that all of these start from
from atlib.lab.study import (
    Sources,
    Study,
    Variant,
    again,
    by,
    fine_tune,
    pair,
    scale_of,
    scratch,
    untrained_maps,
    with_new_head,
)
from atlib.lab.tuning import Range, grid
from atlib.methods.attndistill import AttnDistill
from atlib.methods.distillation import FeatureDistillation, LogitDistillation
from atlib.methods.mean_maps import MeanMapCopy
from atlib.plan import Plan
from atlib.transfer import AttentionTransfer

_METHODS = {"scratch": scratch, "fine-tune": fine_tune, "copy": by(), "distill": by(how="distill")}
FIND, WORLDS = ("find",), ("find", "match")


# --- Which pre-training, and which half of it: features or routing ---

COLOUR = colour("colour")


def _mix(weights: Schooling | None, routing: bool, sources: Sources) -> nn.Module:
    """A teacher's weights (None: the central one's), with maps of the central teacher, or of an untrained
    one."""
    student = with_new_head(sources.teacher(weights), sources)
    if routing:
        return AttentionTransfer(sources.teacher(), student, Plan())
    return untrained_maps(sources, student)


def _with(
    name: str, schooling: Schooling, model: Mapping = {}, rates: Sequence[Mapping] = ()
) -> tuple[Variant, ...]:
    """All that a teacher can give to a student of its own size."""
    return (
        Variant(
            f"{name}, fine-tune",
            partial(fine_tune, schooling=schooling),
            "fine-tune",
            trials=rates,
            student=model,
        ),
        Variant(f"{name}, copy", by(schooling=schooling), student=model),
        Variant(f"{name}, distill", by(how="distill", schooling=schooling), "distill", student=model),
    )


# Weights of one teacher under maps of another need other steps than fine-tuning's, up to 16 times as large.
# All rates are tried: a search that ends where a neighbour is hardly better stays short of fine-tuning's.
_OWN_RATE = grid(lr=(5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2))

PRETRAINING = Study(
    "pretraining",
    "a teacher of another pre-text; useful and useless features with useful and useless routing",
    "not in the paper",
    (
        *_with("colour", COLOUR, rates=_OWN_RATE),
        *(
            Variant(
                f"{features} features, {routing} routing",
                partial(_mix, weights, useful),
                "fine-tune",
                trials=_OWN_RATE,
            )
            for features, weights in (("useful", None), ("useless", COLOUR))
            for routing, useful in (("useful", True), ("useless", False))
        ),
    ),
    seeds=3,
    minutes=25,
    only=FIND,
    teachers=(COLOUR,),
)


# --- How many labels ---


def _label_curve(steps: int, *numbers: int) -> tuple[Variant, ...]:
    return tuple(
        Variant(
            f"{method}, {number} labels",
            CENTRAL.variant(method).build,
            method,
            {"steps": steps},
            labels=number,
            twin=CENTRAL.variant(method).twin,
        )
        for method in ("scratch", "copy-routing-twin", "copy", "fine-tune")
        for number in numbers
    )


LABEL_CURVES = Study(
    "labels",
    "scratch, copy from the image and from a routing twin, fine-tuning, with 250, 4,000 and 32,000 labels at"
    " the central experiment's steps; its own 1,000 are the fourth point",
    "not in the paper",
    _label_curve(500, 250, 4000, 32_000),
    seeds=3,
    minutes=11,
    only=WORLDS,
)

# In Match scratch finds nothing in 500 steps, from any number of labels.
LONGER_LABEL_CURVES = Study(
    "labels-longer",
    "the same for four times as many steps: is it labels or steps that scratch lacks?",
    "not in the paper",
    _label_curve(2000, 4000, 32_000),
    seeds=3,
    minutes=27,
    only=("match",),
)


# --- A mark that lies beside what it marks ---

BESIDE = glyphs.World(pointer=1)

POINTER = Study(
    "pointer",
    "Find with its mark in the cell to the left of the marked glyph, so that no token holds both",
    "not in the paper",
    (Variant("scratch", scratch, "scratch", world=BESIDE),),
    seeds=3,
    minutes=9,
    only=FIND,
    teachers=(Schooling("pointer", world=BESIDE, changes={"steps": 3000}),),
)


# --- Imbalanced labels ---

IMBALANCE = 50.0  # the first class has 50 times as many images as the last


def _imbalanced(scale: GlyphScale | CifarScale, seed: int) -> Images:
    """Imbalanced labels of four times as many drawn: about as many as the scale's balanced ones (of all,
    where it takes all)."""
    return long_tail(scale.labelled(seed, scale.labels and 4 * scale.labels), IMBALANCE, seed)


LONG_TAIL = Study(
    "long-tail",
    "imbalanced labels",
    "iNaturalist 2017 to 2019",
    tuple(Variant(method, build, method, images=_imbalanced) for method, build in _METHODS.items()),
    minutes=5,
)


# --- A teacher's native components, in the student or not ---

# Constructor arguments of the component, and what a standard student's plan needs.
COMPONENTS = {
    "registers": ({"reg_tokens": 4}, {"unequal_prefix": "drop"}),
    "average pooling": ({"global_pool": "avg"}, {}),
}
WITH_COMPONENT = {
    name: Schooling(name.replace(" ", "-"), model=model) for name, (model, _) in COMPONENTS.items()
}


def _matched_or_not(name: str) -> tuple[Variant, ...]:
    model, needs = COMPONENTS[name]
    teacher = WITH_COMPONENT[name]
    return (
        Variant(f"{name}, scratch", scratch, "scratch", student=model),
        Variant(f"{name}, copy to matched", by(schooling=teacher), student=model),
        Variant(f"{name}, copy to standard", by(schooling=teacher, mismatched=True, **needs)),
    )


COMPONENT_STUDY = Study(
    "components",
    "teachers with native components, taught to students that have them too and to standard ones",
    "arXiv 2605.07191: four families fail to transfer to a standard ViT, and transfer to a matched one",
    tuple(variant for name in COMPONENTS for variant in _matched_or_not(name)),
    seeds=3,
    minutes=15,
    only=FIND,
    teachers=tuple(WITH_COMPONENT.values()),
)


# --- Model size ---

_SMALL, _LARGE = {"embed_dim": 32}, {"embed_dim": 96}
SMALL, LARGE = (Schooling(name, model=model) for name, model in (("small", _SMALL), ("large", _LARGE)))


SIZES = Study(
    "sizes",
    "three widths of teacher and student, and a teacher smaller or larger than its student",
    "ViT-B, ViT-L and ViT-H; a small teacher for a larger student is left open",
    (
        Variant("small, scratch", scratch, "scratch", student=_SMALL),
        *_with("small", SMALL, _SMALL),
        Variant("large, scratch", scratch, "scratch", student=_LARGE),
        *_with("large", LARGE, _LARGE),
        *(
            Variant(
                f"{teacher.name} teacher, {name} student, {how}",
                by(how=how, schooling=teacher),
                how,
                student=model,
            )
            for teacher, name, model in ((SMALL, "large", _LARGE), (LARGE, "small", _SMALL))
            for how in ("copy", "distill")
        ),
    ),
    minutes=20,
    only=FIND,
    teachers=(SMALL, LARGE),
)


# --- A pool of ordinary models, for the line that effective robustness is measured from ---

POOL = Study(
    "pool",
    "models trained from scratch with more and fewer labels, steps and weights, and checkpoints along a run",
    "the testbed of arXiv 2007.00644",
    (
        *(
            Variant(f"{labels} labels", scratch, "scratch", labels=labels)
            for labels in (250, 500, 2000, 4000)
        ),
        *(Variant(f"{steps} steps", scratch, "scratch", {"steps": steps}) for steps in (125, 250)),
        Variant("8000 labels, 1000 steps", scratch, "scratch", {"steps": 1000}, labels=8000),
        Variant(
            "8000 labels, step 500 of 1000", scratch, "scratch", {"steps": 1000}, labels=8000, stop_at=500
        ),
        Variant("narrow", scratch, "scratch", student=_SMALL),
        Variant("wide", scratch, "scratch", student=_LARGE),
    ),
    seeds=3,
    minutes=10,
    only=FIND,
)

TEACHER_STUDIES = (PRETRAINING, LONG_TAIL, COMPONENT_STUDY, SIZES, POOL)


# --- Which layers, which heads; how strongly ---


def _pair_in_layers(how: str, end: str, number: int, sources: Sources) -> nn.Module:
    depth = len(scale_of(sources.place).student.build().blocks)
    layers = range(number) if end == "first" else range(depth - number, depth)
    return pair(Plan(how=how, layers=layers), sources)


def _in_layers(how: str, end: str, number: int) -> partial:
    return partial(_pair_in_layers, how, end, number)


def _weights(*values: float) -> tuple[dict, ...]:
    return tuple({"transfer_weight": value} for value in values)


LAYERS = Study(
    "layers",
    "how many layers, from which end, and how many heads of each",
    "curves over the number of transferred layers and heads; Distill reaches 18 of ViT-L's 24",
    (
        *(
            Variant(f"{how} {end} {n}", _in_layers(how, end, n), how)
            for how in ("copy", "distill")
            for end in ("first", "last")
            for n in (1, 2, 3)
        ),
        *(Variant(f"copy heads {n}", by(heads=range(n))) for n in (1, 2, 3)),
    ),
    seeds=3,
    minutes=13,
    only=WORLDS,
)

DISTILLATION = Study(
    "distillation",
    "the weight λ of Distill",
    "λ = 3 in its recipe",
    tuple(
        Variant(f"weight {value:g}", by(how="distill"), "distill", {"transfer_weight": value})
        for value in (0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
    ),
    minutes=9,
    only=WORLDS,
)


# --- Features and predictions: what else can go from a teacher to a student ---


def _copy_into_another(sources: Sources) -> nn.Module:
    return AttentionTransfer(sources.teacher(), with_new_head(sources.another_teacher(), sources), Plan())


def _features(sources: Sources) -> nn.Module:
    return FeatureDistillation(sources.teacher(), sources.student())


def _predictions(hard: bool, sources: Sources) -> nn.Module:
    return LogitDistillation(sources.fine_tuned(), sources.student(), hard=hard)


# Of scratch the central experiment has three a seed.
_AGAIN = ("fine-tune", "copy", "distill")


# Losses of other sizes than that of maps: their weight and the rate are searched together.
_SEARCHED = Range(
    {"lr": AXES["lr"], "transfer_weight": (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)},
    {"lr": START["lr"], "transfer_weight": 1.0},
    {},
)


def _predicted(name: str, task: float, transfer: float) -> Variant:
    weights = {"task_weight": task, "transfer_weight": transfer}
    build = partial(_predictions, name == "hard")
    searched = Range(AXES, START, {})
    return Variant(f"{name} predictions", build, "scratch", weights, searched, needs=("fine-tuned",))


FAMILY = Study(
    "family",
    "what else can be transferred: features, predictions; and three methods once more, with other first"
    " weights",
    "features 81.3, scratch 83.0, copy 85.1, distill 85.7, fine-tuning 85.7 (ViT-L)",
    (
        Variant("features", _features, "distill", trials=_SEARCHED),
        _predicted("soft", 0.9, 0.1),
        _predicted("hard", 0.5, 0.5),
        Variant(
            "copy into another teacher's weights", _copy_into_another, "fine-tune", needs=("another teacher",)
        ),
        *(Variant(f"{method} again", partial(again, _METHODS[method]), method) for method in _AGAIN),
    ),
    minutes=25,
    only=WORLDS,
)


# --- What in a map matters ---


def _mean_of_cell(sources: Sources) -> nn.Module:
    images = sources.unlabelled()
    return MeanMapCopy(
        sources.teacher(),
        sources.student(),
        images.take(range(len(images)))[0],
        glyphs.marked_cell,
        glyphs.GRID**2,
    )


AVERAGES = Study(
    "averages",
    "what in a map matters: averages over examples, layers, heads, queries; the mean map of each marked cell",
    "appendix: averaged over examples 79.7, layers 82.7, heads 82.2, query tokens 79.9",
    (
        *(
            Variant(f"copy mean of {what}", by(average=what))
            for what in ("examples", "layers", "heads", "queries")
        ),
        Variant("copy mean of cell", _mean_of_cell),
    ),
    minutes=8,
    only=FIND,
)


# --- Teacher and student that differ ---

_TWO_HEADS, _WIDE = {"num_heads": 2}, {"embed_dim": 128}
_SHALLOW = {"depth": 2}


def _attndistill(sources: Sources) -> nn.Module:
    return AttnDistill(sources.teacher(), sources.student())


def _two_heads(how: str, remedy: str, **changes) -> Variant:
    return Variant(
        f"two heads, {how} {remedy}", by(how=how, unequal_heads=remedy), how, student=_TWO_HEADS, **changes
    )


PAIRS = Study(
    "pairs",
    "a student with other heads, depth or width than its teacher, with the remedies for each",
    "not in the paper, which pairs equal architectures; aggregated heads are AttnDistill's (arXiv"
    " 2210.00944), the learned matrix of heads is this project's own",
    (
        Variant("two heads, scratch", scratch, "scratch", student=_TWO_HEADS),
        _two_heads("copy", "aggregate"),
        _two_heads("copy", "average"),
        _two_heads("distill", "aggregate"),
        _two_heads("distill", "learn", trials=_weights(10.0, 100.0, 1000.0)),
        Variant(
            "two heads, attndistill",
            _attndistill,
            "distill",
            student=_TWO_HEADS,
            trials=_weights(0.1, 1.0, 10.0),
        ),
        Variant("shallow, scratch", scratch, "scratch", student=_SHALLOW),
        Variant("shallow, copy last layers", by(layers={0: 2, 1: 3}), student=_SHALLOW),
        Variant(
            "shallow, distill last layers",
            by(how="distill", layers={0: 2, 1: 3}),
            "distill",
            student=_SHALLOW,
        ),
        Variant("wide, scratch", scratch, "scratch", student=_WIDE),
        Variant("wide, copy", by(), student=_WIDE),
    ),
    seeds=3,
    minutes=20,
    only=FIND,
)

STUDIES = {
    study.name: study
    for study in (
        LABEL_CURVES,
        LONGER_LABEL_CURVES,
        POINTER,
        DISTILLATION,
        FAMILY,
        LAYERS,
        AVERAGES,
        PAIRS,
        *TEACHER_STUDIES,
    )
}
