"""The study of a mark that lies beside its glyph: do maps carry a message where no token holds both?"""

from dataclasses import replace

from atbook.lab.scales import ALL_RATES, GATE, RATE_UPHILL, Schooling, twin_method
from atbook.lab.study import CENTRAL, Variant, study
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


def _variant(mark: str, method: str) -> Variant:
    return replace(
        CENTRAL.variant(method),
        name=f"mark {mark} its glyph, {method}",
        like=method,
        trials=ALL_RATES if method in _TWINS else RATE_UPHILL,
        schooling=None if method == "scratch" else TEACHERS[mark],
        world=_WORLDS[mark],
    )


POINTING = study(
    "pointing",
    *(_variant("beside", method) for method in ("scratch", "fine-tune", "copy", "distill", *_TWINS)),
    *(_variant("on", method) for method in ("copy", *_TWINS)),
)
