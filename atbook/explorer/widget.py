"""The explorer in a notebook, for models of your own: the page's JavaScript as an anywidget."""

from collections.abc import Mapping
from pathlib import Path

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from atbook.explorer.export import as_content, as_model
from atlib import create_vit
from atlib._util import require_known
from atlib.attention_transfer import AttentionTransfer
from atlib.pair import student_of
from atlib.plan import Plan
from atlib.student import differences

try:
    import anywidget
    import traitlets
except ImportError as error:
    raise ImportError(
        "the explorer needs anywidget in a notebook: pip install anywidget; the page"
        ' "Play with it" of the book needs nothing'
    ) from error

FOLDER = Path(__file__).parent
SCRIPTS = ("model.js", "scenes.js", "page.js", "state.js", "explorer.js", "widget.js")
FALLBACK = (
    "<p>An explorer of {names} in {world}: run this cell in a notebook to open it. The book's own models are"
    ' on its page <a href="../book/play.html">Play with it</a>.</p>'
)


class Explorer(anywidget.AnyWidget):
    """Scenes of a world, and what models answer when they are given other attention maps.

    models: {name: model}, of which one is called "teacher"; a model is a ViT of the size "glyphs", with any
    number of outputs, or an `AttentionTransfer` whose plan copies or distills whole maps of that teacher.
    world: "find" or "match". address: the state shown, as in the address of the book's page, for example
    "#maps=uniform&seed=3"; it follows what the reader does, and can be set.

    Raises `ValueError` for a model of another size, naming both sizes; for models without a teacher; and for
    a pair whose student uses its teacher's maps in a different way, or the maps of a different teacher. Needs
    anywidget (the extra `widget`); `ImportError` says so. A notebook keeps a copy of the page's scripts and
    of the models: some 0.5 MB for each model.
    """

    _esm = "\n".join((FOLDER / name).read_text(encoding="utf-8") for name in SCRIPTS)
    _css = (FOLDER / "explorer.css").read_text(encoding="utf-8")
    content = traitlets.Dict().tag(sync=True)
    address = traitlets.Unicode("").tag(sync=True)

    def __init__(self, models: Mapping[str, nn.Module], world: str = "find", address: str = ""):
        require_known("world", world, ("find", "match"))
        if "teacher" not in models:
            raise ValueError(
                f"models has {', '.join(map(repr, models)) or 'nothing'}, and none called 'teacher': give the"
                " one whose maps the others may use"
            )
        teacher = student_of(models["teacher"])
        described = {name: _described(name, model, teacher) for name, model in models.items()}
        super().__init__(content=as_content({world: described}), address=address)

    def __repr__(self) -> str:
        (world, models), *_ = self.content["worlds"].items()
        return f"Explorer of {', '.join(models)} in {world}"

    def _repr_mimebundle_(self, **options):
        """The live widget, and for static pages a sentence that says where to go."""
        data, metadata = super()._repr_mimebundle_(**options)
        (world, models), *_ = self.content["worlds"].items()
        sentence = FALLBACK.format(names=", ".join(models), world=world.capitalize())
        return data | {"text/html": sentence}, metadata


def _described(name: str, model: nn.Module, teacher: nn.Module) -> dict:
    """A model as the scripts read it. Raises as `Explorer` does."""
    maps = "own"
    if isinstance(model, AttentionTransfer) and model.plan.how == "copy":
        if model.plan != Plan(share_drop_path=model.plan.share_drop_path):
            raise ValueError(
                f"{name!r} does not copy whole maps of all layers and heads, but {model.plan}: the explorer"
                " cannot show that; pass its student alone"
            )
        _require_same(name, model.teacher, teacher)
        maps = "teacher"
    vit = student_of(model)
    _require_size(name, vit)
    return as_model(vit, maps)


def _require_size(name: str, vit: nn.Module) -> None:
    expected = create_vit("glyphs")
    if not isinstance(vit, VisionTransformer):
        raise ValueError(f"{name!r} is a {type(vit).__name__}: the explorer runs timm's VisionTransformer")
    if (size := _size(vit)) != (wanted := _size(expected)):
        raise ValueError(f"{name!r} has {size}; the explorer runs ViTs that have {wanted}")
    if differing := differences(vit, expected):
        diff = ", ".join(f"{part} {here!r} instead of {there!r}" for part, (here, there) in differing.items())
        raise ValueError(f"{name!r} is another ViT than the explorer's: {diff}")


def _size(vit: VisionTransformer) -> str:
    patch = vit.patch_embed
    return (
        f"images of {patch.img_size[0]} x {patch.img_size[1]}, patches of {patch.patch_size[0]},"
        f" {len(vit.blocks)} layers, {vit.blocks[0].attn.num_heads} heads, width {vit.embed_dim},"
        f" MLPs of {vit.blocks[0].mlp.fc1.out_features}"
    )


def _require_same(name: str, own_teacher: nn.Module, teacher: nn.Module) -> None:
    """Raise unless a pair's teacher is `teacher`; only the weights that make its maps are compared."""
    of_teacher = dict(teacher.named_parameters())
    for part, value in own_teacher.named_parameters():
        if part.startswith("blocks.") and ".attn.qkv" in part and not torch.equal(value, of_teacher[part]):
            raise ValueError(
                f"{name!r} copies the maps of another teacher than models['teacher']: open the two in"
                " explorers of their own"
            )
