"""What a reader sees: a block of HTML for a notebook or a page, and a whole page of it."""

import base64
import hashlib
import html
import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from safetensors.torch import save
from torch import Tensor, nn

from atlib._util import write_atomically
from atlib.compatibility import sizes_of
from atlib.pair import Pair, check_images, student_of
from atrun.looking.preparation import Preparation, Prepared, preparation_of, prepare
from atrun.looking.rows import Rows, read_rows

FOLDER = Path(__file__).parent
SMALL = 128  # pixels a side below which the picture is stored without loss
# Names in double underscores are filled in. The script finds its block by the hash of what is in it, so that
# many share a page, and takes nothing from outside.
BLOCK = """<div class="look" data-look="__HASH__">
<style>__STYLE__</style>
<div class="look-before"><img src="__PICTURE__" alt="__ALT__" width="224">
<p>__SAYS__ The answer is interactive, and appears where scripts may run: in a saved page, or in a
notebook that is trusted.</p></div>
<script type="application/json">__CONTENT__</script>
<script>__SCRIPT__</script>
</div>"""
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>__TITLE__</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<style>:root { color-scheme: light dark; }
body { margin: 0 auto; padding: 1rem; max-width: 76rem; font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; margin: 0 0 0.8rem; overflow-wrap: anywhere; }</style></head>
<body><main><h1>__TITLE__</h1>
__BLOCK__
</main></body></html>
"""


class Look(NamedTuple):
    """Where every token of some models looks on some pictures; the last expression of a cell shows it."""

    #: {name of a picture: {name of a model: its rows, and the picture as it was prepared for it}}.
    pictures: Mapping[str, Mapping[str, tuple[Rows, Prepared]]]
    notes: Sequence[str]  #: What was done and what is left out, in sentences.

    @property
    def models(self) -> Mapping[str, tuple[Rows, Prepared]]:
        """Those of the first picture."""
        return next(iter(self.pictures.values()))

    @property
    def title(self) -> str:
        """What it shows, as one line."""
        return f"Where {'do' if len(self.models) > 1 else 'does'} {' and '.join(self.models)} look?"

    def html(self) -> str:
        """The block: style, data and script."""
        models, *more = (
            [
                {"name": name, "photograph": _data_address(prepared.photograph), **rows.content()}
                for name, (rows, prepared) in of_picture.items()
            ]
            for of_picture in self.pictures.values()
        )
        whole = {"models": models, "more": more, "pictures": [*self.pictures], "notes": self.notes}
        # Escaped, because a "<" of a name could end the script element early.
        content = json.dumps(whole, separators=(",", ":"))
        content = content.replace("<", "\\u003c")
        name = hashlib.sha256(content.encode()).hexdigest()[:12]
        parts = {
            "__HASH__": name,
            "__STYLE__": (FOLDER / "look.css").read_text(encoding="utf-8"),
            "__PICTURE__": models[0]["photograph"],
            "__ALT__": "The picture that the models were given",
            "__SAYS__": html.escape(self.title),
            "__CONTENT__": content,
            "__SCRIPT__": (FOLDER / "look.js").read_text(encoding="utf-8").replace("__HASH__", name),
        }
        return filled(BLOCK, parts)

    def page(self) -> str:
        """A whole page, whose address keeps what the reader has chosen."""
        block = self.html().replace('<div class="look"', '<div class="look" data-address', 1)
        return filled(PAGE, {"__TITLE__": html.escape(self.title), "__BLOCK__": block})

    def arrays(self) -> dict[str, Tensor]:
        """All that is shown as numbers, {"PICTURE/MODEL/layer 0/head 1": (queries, N), ...}, rows as they are
        from 8 bits: see `Rows.arrays`."""
        return {
            f"{picture}/{model}/{name}": values
            for picture, models in self.pictures.items()
            for model, (rows, _) in models.items()
            for name, values in rows.arrays().items()
        }

    def save(self, path: str | Path) -> Path:
        """Write what is shown to a file, by its ending: .html, the page; .png or .svg, all panels of the last
        layer (`atrun.looking.picture.panels_of`); .safetensors, `arrays()`. Returns its path."""
        path = Path(path)
        match check_ending(path):
            case ".safetensors":
                return write_atomically(path, save({k: v.contiguous() for k, v in self.arrays().items()}))
            case ".png" | ".svg" as ending:
                from atrun.looking.picture import drawn  # a page draws nothing

                return write_atomically(path, drawn(self.pictures, ending[1:]))
        return write_atomically(path, self.page().encode())

    def __repr__(self) -> str:
        count = sum(rows.levels.numel() for models in self.pictures.values() for rows, _ in models.values())
        return f"{self.title} {count:,} shares to click through; .save(path) writes a page"

    def _repr_html_(self) -> str:
        return self.html()


Picture = str | Path | Image.Image | Tensor
ENDINGS = (".html", ".htm", ".png", ".svg", ".safetensors")


def check_ending(path: Path) -> str:
    """The ending of a file that `Look.save` writes, in small letters. Raises `ValueError` for another."""
    if path.suffix.lower() not in ENDINGS or path.is_dir():
        raise ValueError(f"{path}: name a file that ends with {', '.join(ENDINGS)}")
    return path.suffix.lower()


def look(
    models: nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module],
    images: Picture | Sequence[Picture] | Mapping[str, Picture],
    *,
    preparation: Preparation | Mapping[str, Preparation] | None = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    megabytes: float = 10,
) -> Look:
    """Where every token of a ViT looks on a picture, in every layer and head; beside it rollout, the
    features' similarities, components and norms, and a gradient.

    models: one that `walk` takes, several, or {name: model}; an `AttentionTransfer` is its student, with its
    teacher's maps in it where the plan copies. images: a file, a PIL image, or uint8 pixels (3, height,
    width); several, or {name: one}. preparation: how a picture becomes the models' input, for all or {name:
    preparation}; None takes each model's own (`atrun.looking.preparation.preparation_of`). layers, heads:
    those that are kept, None for all. megabytes (10^6 bytes): how large the rows may be in the page; where
    they do not fit, those of a coarser grid of patches are whole, and the others over blocks of patches
    (`atrun.looking.rows.Coarse`). Rollout is that of Abnar & Zuidema 2020 (arXiv 2005.00928).
    """
    named = _by_name(models, nn.Module, _name)
    pictures = _by_name(images, Picture, lambda it: Path(it).stem if isinstance(it, str | Path) else "image")
    room = int(megabytes * 1e6 * 3 / 4 / len(named) / len(pictures))  # base64 takes four bytes for three
    shown: dict[str, dict] = {picture: {} for picture in pictures}
    notes = []
    for name, model in named.items():
        vit = student_of(model)
        sizes_of(vit)  # refuses what cannot be walked
        chosen = preparation[name] if isinstance(preparation, Mapping) else preparation
        if chosen is None:
            of_pair = model.normalisation if isinstance(model, Pair) and not model.assumed else None
            told = {**vars(of_pair), "source": "as the pair was told"} if of_pair is not None else {}
            chosen = preparation_of(vit, **told)
        check_images(vit, torch.empty(1, 3, *chosen.size))
        for picture, image in pictures.items():
            prepared = prepare(image, chosen)
            rows = read_rows(model, prepared.pixels, room, layers, heads)
            shown[picture][name] = rows, prepared
        prefix = f"{name}: " if len(named) > 1 else ""
        notes += [prefix + sentence for sentence in (chosen.describe(), *_kept(rows))]
    return Look(shown, [*notes, *ALWAYS])


ALWAYS = (
    "Layers, heads, rows and columns count from 0, as in Python.",
    "A row says how one token (the query) shares out its attention: its shares, those of prefix tokens among"
    " them, sum to 1.",
    "Rollout multiplies the layers up to the chosen one, each as half the identity, for the skip connection,"
    " and half the mean of its heads (Abnar and Zuidema 2020, arXiv 2005.00928).",
    "Features are the residual stream after a layer, before the last norm. Similarity is their cosine,"
    " negative ones as 0; components are the patches' first three principal ones, red, green and blue from"
    " smallest to largest (as in DINOv2, arXiv 2304.07193); outliers have norms above twice the patches'"
    " median (compare Darcet et al. 2024, arXiv 2309.16588).",
    "Gradient: the positive part of the gradient of the answer for a layer's map, other layers' held, mean"
    " over heads and queries; the answer is the largest logit, or half the squared length of the output of a"
    " model without classes. LeGrad (Bousselham et al. 2025, arXiv 2404.03214) has this of the last layer.",
    "Shares are stored in 8 bits: none is off by more than 1/255 of its row's largest.",
)


def _kept(rows: Rows) -> list[str]:
    """Which of a model's rows the page has, in sentences, what is left out first."""
    (down, across), prefix = rows.tokens.grid, rows.tokens.prefix
    kept, count = len(rows.down) * len(rows.across), down * across
    sentences = []
    if rows.coarse is not None:
        side = rows.coarse.side
        sentences.append(
            f"Of {len(rows.down)} x {len(rows.across)} of {down} x {across} patches the whole rows are here."
            f" Of the others each share is the mean over a block of {side} x {side} patches; smaller blocks"
            " come with more megabytes, or with fewer layers or heads."
        )
    elif kept < count:
        sentences.append(
            f"Left out: the rows of {count - kept:,} of {count:,} patches. Those of {len(rows.down)} x"
            f" {len(rows.across)} are here, of a grid of {down} x {across}; a click chooses the nearest of"
            " them. More come with more megabytes, or with fewer layers or heads."
        )
    if len(rows.layers) < len(rows.heads):
        layers = ", ".join(str(layer) for layer, _ in rows.layers)
        sentences.append(f"Left out: of {len(rows.heads)} layers all but {layers}.")
    if any(len(heads) < rows.heads[layer] for layer, heads in rows.layers):
        layer, heads = rows.layers[0]
        sentences.append(
            f"Left out: of {rows.heads[layer]} heads all but {', '.join(map(str, heads))}; mean and rollout"
            " are of all."
        )
    patches = f"{'all ' if kept == count else ''}{kept:,} patches"
    sentences.append(
        f"Here are {len(rows.largest):,} rows of {rows.levels.shape[1]:,} shares: the heads of"
        f" {len(rows.layers)} layers, their {', '.join(rows.beside)}, for the queries"
        f" {', '.join([*prefix, patches])}."
    )
    return sentences


def _by_name(given, kinds, name_of: Callable) -> dict[str, Any]:
    """{name: model or picture} of one, several or a mapping of them; those of one name are numbered."""
    if isinstance(given, Mapping):
        return dict(given)
    items = [given] if isinstance(given, kinds) else list(given)
    names = list(map(name_of, items))
    if len(set(names)) < len(names):
        names = [f"{name} ({index})" for index, name in enumerate(names)]
    return dict(zip(names, items))


def _name(model: nn.Module) -> str:
    """The name of a model's architecture in timm, or its class. Not of its weights: they may be others."""
    vit = student_of(model)
    return (getattr(vit, "pretrained_cfg", None) or {}).get("architecture") or type(vit).__name__


def _data_address(photograph: Image.Image) -> str:
    kind = "PNG" if max(photograph.size) < SMALL else "JPEG"
    buffer = io.BytesIO()
    photograph.save(buffer, kind, **({} if kind == "PNG" else {"quality": 88}))
    return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def filled(template: str, parts: Mapping[str, str]) -> str:
    """A template with its parts filled in, in one pass: what is filled in is not looked through."""
    return re.sub("|".join(parts), lambda name: parts[name[0]], template)
