"""The study of pre-training methods: which of them make maps worth copying? The table of the paper (arXiv
2411.09702, "pre-training methods"), in worlds in which hidden patches can be painted."""

from collections.abc import Callable, Mapping
from functools import partial

from timm.models.vision_transformer import VisionTransformer
from torch import nn

from atbook.lab.scales import Schooling, painter
from atbook.lab.study import Sources, Study, Variant, by, fine_tune, scratch, study, untrained_maps
from atbook.lab.tuning import Ladder
from atbook.worlds import glyph_images, glyphs
from atbook.worlds.pretext import unpainted
from atfamily.contrast import Dino, MoCo, contrast_loss, draw_patches, unmatched
from atlib.data import Images
from atlib.mae import mae_loss
from atlib.objectives import student_loss
from atlib.plan import Plan
from atrun.data.views import looks, small_views

# All cells lie half a patch further, so that each glyph is in four patches and a hidden part of it can be
# painted from the others; in the worlds themselves cells are drawn independently, patch by patch. Half of the
# noise, which nobody can paint.
PAINTABLE = {task: glyphs.World(task=task, offset=glyphs.CELL // 2, noise=0.1) for task in ("find", "match")}

_STEPS = 2000  # as the retrieval teacher of Find has
# A crop keeps half of the scene or more, that what is asked for is mostly in both; a mirrored glyph is none.
_SCALE = (0.5, 1.0)


def _views(local: int, drawn: glyphs.Glyphs) -> Images:
    """Views of a scene; the hue, which Match asks for, is left as it is."""
    views = small_views(looks(_SCALE, local), flip=0.0, jitter=(0.4, 0.4, 0.2, 0.0), grey=0.0)
    return glyph_images(drawn).with_augment(views)


# What makes a ViT a module that is trained without labels.


def _moco(vit: VisionTransformer, central: Callable[[], VisionTransformer]) -> nn.Module:
    return MoCo(draw_patches(vit), hidden=256, projection=64)


def _dino(vit: VisionTransformer, central: Callable[[], VisionTransformer]) -> nn.Module:
    return Dino(vit, hidden=256, bottleneck=64, outputs=1024, local_size=16)


def _school(name: str, world: glyphs.World, changes: Mapping, **options) -> Schooling:
    """changes: to the pre-training recipe. Every teacher has other first weights than the central one, and
    the evenness of its maps is measured."""
    return Schooling(
        name,
        world=world,
        changes={"steps": _STEPS, "label_smoothing": 0.0, **changes},
        again=1,
        measures_maps=True,
        **options,
    )


def _schoolings(world: glyphs.World) -> dict[str, Schooling]:
    """One for each of `METHODS`, and in Match the book's own task, of which it is known that it teaches where
    to look: without it, a world in which no maps help would look the same as teachers that have none."""
    painted = _school(
        f"paintable-{world.task}-mae",
        world,
        {"lr": 4e-3, "betas": (0.9, 0.95)},
        outputs=0,
        images=glyph_images,
        loss=mae_loss,
        around=painter,
        unlearned=unpainted,
    )
    contrasted = _school(
        f"paintable-{world.task}-moco",
        world,
        {"lr": 2e-3, "weight_decay": 0.1},
        outputs=0,
        images=partial(_views, 0),
        loss=contrast_loss,
        around=_moco,
        unlearned=unmatched,
    )
    answered = _school(
        f"paintable-{world.task}-dino",
        world,
        {"lr": 1e-3, "weight_decay": 0.04, "weight_decay_end": 0.4},
        outputs=0,
        images=partial(_views, 2),
        loss=contrast_loss,
        around=_dino,
        unlearned=unmatched,
        model={"dynamic_img_size": True},  # its small views are a quarter of the size
    )
    labelled = _school(
        f"paintable-{world.task}-supervised",
        world,
        {"label_smoothing": 0.1},
        outputs=len(glyphs.SHAPES),
        images=glyph_images,
        loss=student_loss,
    )
    schoolings = dict(zip(METHODS, (painted, contrasted, answered, labelled), strict=True))
    if world.task == "match":
        schoolings["retrieval"] = _school("paintable-match-retrieval", world, {"steps": 3000})
    return schoolings


METHODS = ("mae", "moco", "dino", "supervised")
_RATES = Ladder("lr", (1e-3, 2e-3, 4e-3, 8e-3))
_GIVEN: dict[str, Callable[[Sources], nn.Module]] = {
    "fine-tune": fine_tune,
    "copy": by(),
    "distill": by(how="distill"),
}


def _study(name: str, world: glyphs.World) -> Study:
    options = {"trials": _RATES, "world": world}
    return study(
        name,
        Variant("scratch", scratch, "scratch", **options),
        Variant("untrained, copy", untrained_maps, **options),
        Variant(
            "untrained, distill", partial(untrained_maps, plan=Plan(how="distill")), "distill", **options
        ),
        *(
            Variant(f"{teacher}, {how}", build, how, schooling=school, **options)
            for teacher, school in _schoolings(world).items()
            for how, build in _GIVEN.items()
        ),
    )


PRETRAINING_METHODS = _study("pretraining-methods", PAINTABLE["find"])
PRETRAINING_METHODS_MATCH = _study("pretraining-methods-match", PAINTABLE["match"])
