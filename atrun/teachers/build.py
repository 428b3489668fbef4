"""From the weights of a teacher's file to the ViT that they are of."""

import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import timm
import torch
from timm.models.beit import Beit
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from atlib.checkpoint import count, header_normalisation
from atlib.maps import Grid
from atlib.pair import IMAGENET, Normalisation, attach, image_size_of
from atlib.vit import Architecture, check_activation, without_weights
from atrun.teachers.files import Weights, normalisation_beside
from atrun.teachers.names import UNNEEDED, Encoder, find_encoder, prefix_and_grid

OF_TIMM = ("model.safetensors", "pytorch_model.bin")  # as timm's `save_for_hf` calls a file of weights
AFTER_THE_BLOCKS = ("norm.", "fc_norm.", "attn_pool.")  # no attention map depends on these


class Teacher(NamedTuple):
    """A ViT that can teach, and how it was read. vit: in eval mode, without a class head, with its
    normalisation where that is known (`atlib.pair.Normalisation.of`); name: the timm name or path;
    architecture: what builds `vit`; source: what kind of file; used: how many of the file's tensors are in
    `vit`; unused: the names of the others; resized: how positions were fitted to the image size; missing:
    weights that the file lacks and no map needs; assumed: what weights do not show; normalised: what says how
    its images are normalised; guessed: what decides maps and was guessed, such as its heads.
    """

    vit: VisionTransformer | Eva
    name: str
    architecture: Architecture
    source: str
    used: int
    unused: Sequence[str]
    resized: str | None = None
    missing: Sequence[str] = ()
    assumed: Sequence[str] = ()
    normalised: str = ""
    guessed: str = ""

    @property
    def normalisation(self) -> Normalisation | None:
        """How images are normalised for it; None where that is not known."""
        return Normalisation.of(self.vit)

    def view(self) -> str:
        """What it sees, in a few words: size, mean and standard deviation of its images."""
        size = image_size_of(self.vit)
        at = "images of any size" if size is None else f"images of {size[0]} x {size[1]} px"
        if self.normalisation is None:
            return f"{at}; how they were normalised is not known: they are taken as they come"
        return f"{at}, {self.normalisation} ({self.normalised})"


def normalisation_of(
    architecture: str | None, weights: Weights, encoder: Encoder, path: Path
) -> tuple[Normalisation | None, str]:
    """How images are normalised for a file's ViT, and what says so: its header, a JSON file beside it, the
    timm name that was given, or the code that writes such files; (None, "") where nothing does."""
    if (normalisation := header_normalisation(weights.header)) is not None:
        return normalisation, "its file says so"
    normalisation, source = normalisation_beside(path)
    if normalisation is None and architecture is not None and "." in architecture:
        normalisation = Normalisation.of(on_meta(Architecture(architecture)))
        source = f"as timm says of {architecture}"
    if normalisation is None and encoder.writer:
        return IMAGENET, "as the code that writes such files does"
    return normalisation, source if normalisation is not None else ""


def architecture_in_file(weights: Weights, path: Path) -> Architecture | None:
    """The architecture that a file's header says, or timm's `config.json` beside it; None without either."""
    described, config = weights.header.get("architecture"), {}
    if described is None and path.name in OF_TIMM:
        try:
            config = json.loads((path.parent / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
    name, trained = config.get("architecture"), config.get("pretrained_cfg") or {}
    if isinstance(name, str) and timm.is_model(name):
        arguments = dict(config.get("model_args") or {})
        if trained.get("fixed_input_size"):  # timm takes it from there
            arguments = {"img_size": trained["input_size"][1:]} | arguments
        described = {"name": name, "overrides": arguments}
    if described is None:
        return None
    try:
        native = Architecture.read(described)
        if not config:  # timm's weights may come without a head
            native.require_numbers(count(weights.tensors))
        on_meta(native)
    except Exception as error:  # a header may hold anything, and timm raises half a dozen kinds
        raise ValueError(f"its header or config.json cannot be built ({error})") from error
    if config:
        check_activation(f"{native.name}.{trained.get('tag')}", native.overrides)
    return native


def encoder_for(weights: Weights, native: Architecture) -> Encoder:
    """The weights of a known architecture in a file, by timm's names."""
    model = on_meta(headless(native, None))
    if not any("visual.class_embedding" in name for name in weights.tensors):
        as_they_are = find_encoder(weights, names=())
        needed = (name for name in model.state_dict() if not name.startswith(AFTER_THE_BLOCKS))
        if all(name in as_they_are.state for name in needed):
            return as_they_are
        if not isinstance(model, Eva | Beit):
            return find_encoder(weights)
    with contextlib.redirect_stdout(None):  # timm prints which biases of DINOv3 it leaves out
        state = sys.modules[type(model).__module__].checkpoint_filter_fn(dict(weights.tensors), model)
    state = {name: value for name, value in state.items() if not UNNEEDED.match(name)}
    return Encoder(state, [], f"converted by timm to {native.name}")


def headless(native: Architecture, image_size: int | None) -> Architecture:
    """The architecture without a class head, for images of `image_size` pixels (None: of its own size)."""
    sized = {} if image_size is None else {"img_size": image_size}
    return Architecture(native.name, {**native.overrides, "num_classes": 0, **sized})


def filled(
    path: Path,
    native: Architecture,
    encoder: Encoder,
    image_size: int | None,
    normalisation: tuple[Normalisation | None, str],
    assumed: Sequence[str],
) -> Teacher:
    """The ViT with the encoder's weights in it, positions resized; assumed: as in `Teacher`."""
    check_image_size(native, image_size)
    vit, state, resized = headless(native, image_size).build(), dict(encoder.state), None
    if "pos_embed" in state and getattr(vit, "pos_embed", None) is not None:
        prefix = 0 if getattr(vit, "no_embed_class", False) else vit.num_prefix_tokens
        grid_from, grid_to = grid_of(native), tuple(vit.patch_embed.grid_size)
        # A named architecture may be of another size than the file.
        if state["pos_embed"].shape[1] != prefix + grid_from[0] * grid_from[1]:
            prefix_there, grid_from = prefix_and_grid(state)
            if prefix_there != prefix:
                raise ValueError(f"positions for {prefix_there} prefix tokens, the architecture has {prefix}")
        resized = resizing(grid_from, grid_to)
        if resized is not None:
            state["pos_embed"] = resized_positions(state["pos_embed"], prefix, grid_from, grid_to)
    try:
        missing, left = vit.load_state_dict(state, strict=False)
    except RuntimeError as error:  # other shapes
        raise ValueError(f"{encoder.source}: {error}: name another model with architecture=") from error
    wrong = [f"{name} is missing" for name in missing if not name.startswith(AFTER_THE_BLOCKS)]
    wrong += [f"there is no place for {name}" for name in left if not name.startswith(AFTER_THE_BLOCKS)]
    if wrong:
        listed = f"{'; '.join(wrong[:4])}; {len(wrong)} in all"
        raise ValueError(f"{encoder.source}: {listed}: name another model with architecture=")
    attach(vit, normalisation[0])
    return Teacher(
        vit.eval(),
        str(path),
        headless(native, image_size),
        encoder.source,
        used=len(state) - len(left),
        unused=[*encoder.unused, *left],
        resized=resized,
        missing=missing,
        assumed=assumed,
        normalised=normalisation[1],
    )


def resized_positions(positions: Tensor, prefix: int, grid_from: Grid, grid_to: Grid) -> Tensor:
    """Positions (1, prefix + patches, D) for another grid, bicubic as in DeiT (arXiv 2012.12877, section 3)
    and antialiased as timm does it. Timm 1.0.26 leaves 2 x 8 patches as they are for 4 x 4 (timm#2737)."""
    grid = positions[:, prefix:].float().unflatten(1, grid_from).permute(0, 3, 1, 2)
    grid = nn.functional.interpolate(grid, grid_to, mode="bicubic", antialias=True)
    patches = grid.flatten(2).mT.to(positions.dtype)
    return torch.cat([positions[:, :prefix], patches], 1)


def on_meta(architecture: Architecture) -> VisionTransformer | Eva:
    """The model that an architecture describes, without its weights."""
    with without_weights():
        return architecture.build()


def grid_of(architecture: Architecture) -> Grid:
    """Patches down and across of an architecture, without making its weights."""
    return tuple(on_meta(architecture).patch_embed.grid_size)


def check_image_size(architecture: Architecture, image_size: int | None) -> None:
    """Raise `ValueError` unless images of that size are whole patches."""
    if image_size is None:
        return
    down, across = on_meta(architecture).patch_embed.patch_size
    if image_size < 1 or image_size % down or image_size % across:
        close = down * max(1, round(image_size / down))
        raise ValueError(f"image_size={image_size}: patches have {down} x {across} pixels, take {close}")


def resizing(grid_from: Grid, grid_to: Grid) -> str | None:
    """How positions came from one grid to another, in words; None where the grids are the same."""
    if tuple(grid_from) == tuple(grid_to):
        return None
    (down, across), (rows, columns) = grid_from, grid_to
    return f"positions resized bicubically from {down} x {across} to {rows} x {columns} patches"


def not_finite(vit: VisionTransformer | Eva) -> list[str]:
    """The names of weights with NaN or infinity in them."""
    weights = vit.state_dict().items()
    return [name for name, value in weights if value.is_floating_point() and not value.isfinite().all()]
