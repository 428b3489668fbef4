"""The studies of chapters 16 to 19: other pre-training, other components, other sizes, other amounts and kinds of labels.

Their teachers are pre-trained for half of the central teachers' steps, all alike, so they are compared with each other and with "standard".
"""

from functools import partial

from torch import nn

from atlib import glyphs
from atlib.builders import by, fine_tune, scratch, untrained_maps, with_new_head
from atlib.data import Images
from atlib.plan import Plan
from atlib.scales import CifarScale, GlyphScale
from atlib.schooling import Schooling, colour
from atlib.selection import long_tail
from atlib.study import Sources, Study, Variant
from atlib.transfer import AttentionTransfer

_SHORT = {"steps": 1000}
STANDARD = Schooling("standard", changes=_SHORT)


# --- Which pre-training, and which half of it: features or routing ------------------------------------------------------

COLOUR = colour("colour", changes=_SHORT)
OTHER_DATA = Schooling("other-data", world=glyphs.World(rendering="inverted"), changes=_SHORT)


def _mix(weights: Schooling, maps: Schooling | None, sources: Sources) -> nn.Module:
    """One teacher's weights, with another's maps copied (None: of an untrained one)."""
    student = with_new_head(sources.schooled(weights), sources)
    return untrained_maps(sources, student) if maps is None else AttentionTransfer(sources.schooled(maps), student, Plan())


def _methods(name: str, schooling: Schooling) -> tuple[Variant, ...]:
    return (Variant(f"{name}, fine-tune", partial(fine_tune, schooling=schooling), "fine-tune"),
            Variant(f"{name}, copy", by(schooling=schooling)),
            Variant(f"{name}, distill", by(how="distill", schooling=schooling), "distill"))


PRETRAINING = Study(
    "pretraining", "teachers of another pre-text and of other data; useful and useless features with useful and useless routing",
    "teachers pre-trained on ImageNet-22k and COCO; the other pre-text is ours",
    (*_methods("standard", STANDARD), *_methods("colour", COLOUR), *_methods("other data", OTHER_DATA),
     *(Variant(f"{features} features, {routing} routing", partial(_mix, weights, maps), "fine-tune")
       for features, weights in (("useful", STANDARD), ("useless", COLOUR)) for routing, maps in (("useful", STANDARD), ("useless", None)))),
    minutes=35, only="built-in", teachers=(STANDARD, COLOUR, OTHER_DATA))


# --- Imbalanced labels --------------------------------------------------------------------------------------------------

IMBALANCE = 50.0  # the first class has 50 times as many images as the last


def _imbalanced(scale: GlyphScale | CifarScale, seed: int) -> Images:
    """Imbalanced labels of four times as many drawn: about as many as the scale's balanced ones (of all, where it takes all)."""
    return long_tail(scale.labelled(seed, scale.labels and 4 * scale.labels), IMBALANCE, seed)


LONG_TAIL = Study(
    "long-tail", "imbalanced labels", "iNaturalist 2017 to 2019",
    tuple(Variant(method, build, method, images=_imbalanced)
          for method, build in (("scratch", scratch), ("fine-tune", fine_tune), ("copy", by()), ("distill", by(how="distill")))),
    minutes=5)


# --- A teacher's native components, in the student or not ----------------------------------------------------------------

# Constructor arguments of the component, and what a standard student's plan needs. Layer scale starts at 0.1, CaiT's value for up to 18 layers.
COMPONENTS = {"layer scale": ({"init_values": 0.1}, {}), "registers": ({"reg_tokens": 4}, {"unequal_prefix": "drop"}),
              "pre-norm": ({"pre_norm": True}, {}), "average pooling": ({"global_pool": "avg"}, {})}
WITH_COMPONENT = {name: Schooling(name.replace(" ", "-"), model=model, changes=_SHORT) for name, (model, _) in COMPONENTS.items()}


def _matched_or_not(name: str) -> tuple[Variant, ...]:
    model, needs = COMPONENTS[name]
    teacher = WITH_COMPONENT[name]
    return (Variant(f"{name}, scratch", scratch, "scratch", student=model),
            Variant(f"{name}, copy to matched", by(schooling=teacher), student=model),
            Variant(f"{name}, copy to standard", by(schooling=teacher, mismatched=True, **needs)),
            Variant(f"{name}, distill to matched", by(how="distill", schooling=teacher), "distill", student=model),
            Variant(f"{name}, distill to standard", by(how="distill", schooling=teacher, mismatched=True, **needs), "distill"))


COMPONENT_STUDY = Study(
    "components", "teachers with native components, taught to students that have them too and to standard ones",
    "arXiv 2605.07191: four families fail to transfer to a standard ViT, and transfer to a matched one",
    tuple(variant for name in COMPONENTS for variant in _matched_or_not(name)),
    minutes=50, only="built-in", teachers=tuple(WITH_COMPONENT.values()))


# --- Model size -----------------------------------------------------------------------------------------------------------

_SMALL, _LARGE = {"embed_dim": 32}, {"embed_dim": 96}
SMALL, LARGE = (Schooling(name, model=model, changes=_SHORT) for name, model in (("small", _SMALL), ("large", _LARGE)))


def _of_size(name: str, schooling: Schooling, model: dict) -> tuple[Variant, ...]:
    return (Variant(f"{name}, scratch", scratch, "scratch", student=model),
            Variant(f"{name}, fine-tune", partial(fine_tune, schooling=schooling), "fine-tune", student=model),
            Variant(f"{name}, copy", by(schooling=schooling), student=model),
            Variant(f"{name}, distill", by(how="distill", schooling=schooling), "distill", student=model))


SIZES = Study(
    "sizes", "three widths of teacher and student, and a teacher smaller or larger than its student",
    "ViT-B, ViT-L and ViT-H; a small teacher for a larger student is left open",
    (*_of_size("small", SMALL, _SMALL), *_of_size("large", LARGE, _LARGE),
     *(Variant(f"{teacher.name} teacher, {name} student, {how}", by(how=how, schooling=teacher), how, student=model)
       for teacher, name, model in ((SMALL, "large", _LARGE), (LARGE, "small", _SMALL)) for how in ("copy", "distill"))),
    minutes=25, only="built-in", teachers=(SMALL, LARGE))


# --- A pool of ordinary models, for the line that effective robustness is measured from -------------------------------------

POOL = Study(
    "pool", "models trained from scratch with more and fewer labels, steps and weights, and checkpoints along a run", "the testbed of arXiv 2007.00644",
    (*(Variant(f"{labels} labels", scratch, "scratch", labels=labels) for labels in (250, 500, 2000, 4000)),
     *(Variant(f"{steps} steps", scratch, "scratch", {"steps": steps}) for steps in (100, 200)),
     Variant("8000 labels, 800 steps", scratch, "scratch", {"steps": 800}, labels=8000),
     *(Variant(f"8000 labels, step {step} of 800", scratch, "scratch", {"steps": 800}, labels=8000, stop_at=step) for step in (50, 150, 400)),
     Variant("narrow", scratch, "scratch", student=_SMALL), Variant("wide", scratch, "scratch", student=_LARGE)),
    seeds=3, minutes=12, only="built-in")

TEACHER_STUDIES = (PRETRAINING, LONG_TAIL, COMPONENT_STUDY, SIZES, POOL)
