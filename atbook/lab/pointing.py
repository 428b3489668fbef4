"""The study of a mark that lies beside its glyph: do maps carry a message where no token holds both?"""

from functools import partial

from atbook.lab.scales import ALL_RATES, AXES, GATE, START, Schooling, twin_method
from atbook.lab.study import CENTRAL, Study, Variant, by, fine_tune, scratch
from atbook.lab.tuning import Range
from atbook.worlds import glyphs, pretext

ON, BESIDE = glyphs.World(), glyphs.World(pointer=1)


def _schooling(name: str, world: glyphs.World, steps: int) -> Schooling:
    return Schooling(
        name,
        pretext.RETRIEVAL_OUTPUTS + glyphs.GRID**2,
        pretext.placed_images,
        pretext.placed_loss,
        world,
        changes={"steps": steps},
        gate=GATE,
        unlearned=pretext.unlearned_pixels,
    )


# The pre-text asks for the place in both worlds, so that they differ in where the mark lies and in nothing
# else that a teacher is taught. Two looks are learned later than one.
TEACHERS = {"beside": _schooling("beside", BESIDE, 8000), "on": _schooling("placed", ON, 2000)}
_WORLDS = {"beside": BESIDE, "on": ON}
_TWINS = tuple(map(twin_method, ("routing", "message")))
_UPHILL = Range({"lr": AXES["lr"]}, {"lr": START["lr"]}, {}, step=0.0)


def _variant(mark: str, method: str) -> Variant:
    school = TEACHERS[mark]
    builds = {
        "scratch": scratch,
        "fine-tune": partial(fine_tune, schooling=school),
        "distill": by(how="distill", schooling=school),
    }
    return Variant(
        "mark {mark} its glyph, {method}",
        builds.get(method, by(schooling=school)),
        method,
        trials=ALL_RATES if method in _TWINS else _UPHILL,
        schooling=None if method == "scratch" else school,
        twin=CENTRAL.variant(method).twin,
        world=_WORLDS[mark],
        differs={"mark": mark, "method": method},
    )


POINTING = Study(
    "pointing",
    "Find with the mark beside its glyph, and on it as elsewhere: scratch, fine-tuned, distilled, and copied"
    " from maps of the image, of a routing twin and of a message twin",
    "not in the paper",
    (
        *(_variant("beside", method) for method in ("scratch", "fine-tune", "copy", "distill", *_TWINS)),
        *(_variant("on", method) for method in ("copy", *_TWINS)),
    ),
    seeds=5,
    only=("find",),
)
