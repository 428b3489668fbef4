"""Create Vision Transformers: the book's small presets, and any timm ViT by name."""

import difflib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
from timm.models import checkpoint_seq
from timm.models.beit import Beit
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva, EvaBlock
from timm.models.naflexvit import NaFlexVit
from timm.models.vision_transformer import Block, VisionTransformer
from timm.models.vision_transformer_relpos import VisionTransformerRelPos
from torch.overrides import TorchFunctionMode

from atlib.attention import Unwalkable, Walk, check_walkable, walk
from atlib.pair import attach, config_of

# Constructor arguments of timm's.
PRESETS: dict[str, dict] = {
    # 16 patches + class token. The pilot of the built-in world; 0.2 M parameters, trains on a laptop.
    "glyphs": dict(img_size=32, patch_size=8, embed_dim=64, depth=4, num_heads=4, num_classes=8),
    # 64 patches + class token. For scenes (`atbook.worlds.scenes`) on a laptop; 0.2 M parameters.
    "scenes": dict(img_size=64, patch_size=8, embed_dim=64, depth=4, num_heads=4, num_classes=8),
    # 64 patches + class token. For CIFAR-10 on a CPU; 0.5 M parameters.
    "cifar-small": dict(img_size=32, patch_size=4, embed_dim=96, depth=4, num_heads=4, num_classes=10),
    # 64 patches + class token. For CIFAR-10; 2.7 M parameters, wants a GPU for a full schedule.
    "cifar": dict(img_size=32, patch_size=4, embed_dim=192, depth=6, num_heads=6, num_classes=10),
}

# timm's ViTs.
VITS = (VisionTransformer, Eva, Beit, VisionTransformerRelPos, NaFlexVit)
# What first weights are drawn with, in place.
DRAWING = frozenset("add_ clamp_ div_ erfinv_ fill_ mul_ normal_ sub_ trunc_normal_ uniform_ zero_".split())


@contextmanager
def without_weights() -> Iterator[None]:
    """Within it models are built on the meta device, which has shapes and no numbers. First weights are not
    drawn, which would take five times as long as all the rest."""
    with torch.device("meta"), _NothingDrawn():
        yield


class _NothingDrawn(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__name__", "") in DRAWING:
            tensor = args[0] if args else kwargs["tensor"]
            if tensor.is_meta:
                return tensor
        return function(*args, **(kwargs or {}))


# What a file may say of a model: constructor arguments of timm's classifiers that are plain values. Not what
# `timm.create_model` takes for itself (checkpoint_path ...): a file could name a pickle or an address.
SIZES_OF_FILES = {  # at most; also of classifiers that are no ViT
    name: most
    for most, names in {
        2**5: "output_stride",
        2**6: "mlp_ratio attn_pool_mlp_ratio",
        2**9: "depth layers depths num_blocks",
        2**10: "patch_size in_chans num_heads num_kv_heads attn_pool_num_heads window_size kernel_size"
        " cardinality",
        2**12: "reg_tokens num_reg_tokens ref_feat_shape swiglu_align_to base_width stem_width",
        2**14: "img_size input_size",
        2**15: "embed_dim num_features dims",
        2**20: "num_classes",
    }.items()
    for name in names.split()
}
OTHERS_OF_FILES = frozenset(
    "global_pool qkv_bias qk_norm scale_attn_norm scale_mlp_norm proj_bias init_values class_token"
    " pos_embed no_embed_class pre_norm final_norm fc_norm pool_include_prefix dynamic_img_size"
    " dynamic_img_pad drop_rate pos_drop_rate patch_drop_rate proj_drop_rate attn_drop_rate"
    " drop_path_rate weight_init fix_init distilled embed_norm_layer norm_layer act_layer attn_layer"
    " qkv_fused swiglu_mlp scale_mlp scale_attn_inner attn_type attn_only_layer_scale use_abs_pos_emb"
    " use_rot_pos_emb rope_type rope_grid_offset rope_grid_indexing rope_temperature rope_rotate_half"
    " rope_shift_coords rope_jitter_coords rope_rescale_coords rope_mrope_section use_post_norm"
    " use_pre_transformer_norm use_post_transformer_norm use_fc_norm head_init_scale use_rel_pos_bias"
    " use_shared_rel_pos_bias rel_pos_type shared_rel_pos stem_type depth_token_only"
    " mlp_ratio_token_only".split()
)
MOST_WEIGHTS = 2**33  # weights, and twice the largest of timm's ViTs has
MOST_PATCHES = 2**16


def check_timm(vit: torch.nn.Module) -> None:
    """Raise `Unwalkable` unless the model is a `VisionTransformer` or `Eva` of timm with pre-norm blocks."""
    check_walkable(vit)
    of_timm = isinstance(vit, (VisionTransformer, Eva))
    if not of_timm or any(not isinstance(block, (Block, EvaBlock)) for block in vit.blocks):
        raise Unwalkable(f"a {type(vit).__name__}: no VisionTransformer or Eva of timm, of plain blocks")


def through_blocks(vit: VisionTransformer, tokens: torch.Tensor) -> torch.Tensor:
    """What a ViT's blocks make of tokens (B, N, D), checkpointed where that was asked."""
    return checkpoint_seq(vit.blocks, tokens) if vit.grad_checkpointing else vit.blocks(tokens)


class _Blocks(torch.nn.Module):
    def __init__(self, vit: VisionTransformer):
        super().__init__()
        self.vit = vit

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return through_blocks(self.vit, tokens)


def walk_tokens(vit: VisionTransformer, tokens: torch.Tensor, *, stop_after: int | None = None) -> Walk:
    """Walk the blocks from tokens (B, N, D) that are embedded already, positions included; `logits` is None.
    Raises `Unwalkable` for another model than timm's `VisionTransformer`."""
    if not isinstance(vit, VisionTransformer):
        raise Unwalkable(f"a {type(vit).__name__} may rotate or bias by place, which tokens alone do not say")
    return walk(_Blocks(vit), tokens, stop_after=stop_after)._replace(logits=None)


class WeightsUnavailable(RuntimeError):
    """Pre-trained weights were asked for and could not be obtained; the message says where to place them."""


def create_vit(name_or_config: str | Mapping, **overrides) -> VisionTransformer | Eva:
    """Build a timm ViT, unmodified, from a preset name, a timm name (of the classes `VITS`), or a mapping of
    `VisionTransformer`'s constructor arguments.

    `overrides` are timm's constructor arguments (`num_classes=10`, `drop_path_rate=0.1`, ...); for a timm
    name also `pretrained=True`, and for a preset or a mapping also `distilled=True`, which adds DeiT's
    distillation token. The model says how images are normalised for it where weights are read or the name has
    a tag. Raises `ValueError` for an unknown name or no ViT, and `WeightsUnavailable` when weights cannot be
    downloaded.
    """
    vit = create_classifier(name_or_config, **overrides)
    if not isinstance(vit, VITS):
        raise ValueError(f"{name_or_config!r} is a {type(vit).__name__}, no ViT: use timm.create_model")
    return vit


def create_classifier(name_or_config: str | Mapping, **overrides) -> torch.nn.Module:
    """What `create_vit` builds, or any other classifier of timm's by name, such as a ResNet; `img_size` is
    left out for a network that takes images of any size."""
    arguments = {key: value for key, value in overrides.items() if key != "pretrained"}
    if isinstance(name_or_config, Mapping) or name_or_config in PRESETS:
        name = name_or_config
        if overrides.get("pretrained"):
            raise ValueError(f"{name!r} has no published weights: pretrained=True needs a timm name")
        plain = {**(name if isinstance(name, Mapping) else PRESETS[name]), **arguments}
        kind = VisionTransformerDistilled if plain.pop("distilled", False) else VisionTransformer
        model = kind(**plain)
    else:
        name = name_or_config.partition(".")[0]
        try:
            model = _of_name(name_or_config, overrides)
        except TypeError as error:
            if "img_size" not in overrides or "img_size" not in str(error):
                raise
            of_any_size = {key: value for key, value in overrides.items() if key != "img_size"}
            model = _of_name(name_or_config, of_any_size)
    # it says with what arguments it was created, where timm's models say their name: for `create_student`
    model.pretrained_cfg = config_of(model) | {"create_vit": (name, arguments)}
    return model


def _of_name(name: str, overrides: Mapping) -> torch.nn.Module:
    if not _is_in_timm(name):
        modules = {kind.__module__.rpartition(".")[2] for kind in VITS} | {"deit"}
        tags = "." in name
        lists = [timm.list_models(module=one, pretrained=tags, include_tags=tags) for one in modules]
        names = [*PRESETS, *sum(lists, [])]
        close = ", ".join(difflib.get_close_matches(name, names, n=5, cutoff=0.5))
        raise ValueError(f"no ViT is called {name!r}. Close: {close}; presets: {', '.join(PRESETS)}")
    if overrides.get("pretrained"):
        check_activation(name, overrides)
        model = _with_weights(name, overrides)
    else:
        model = timm.create_model(name, **overrides)
        if "." not in name:  # timm then notes the facts of its usual weights, which these are not
            attach(model, None)
    scaled = any(key.rpartition(".")[2].startswith("gamma") for key, _ in model.named_parameters())
    if overrides.get("init_values", 0) is None and scaled:
        raise ValueError(f"init_values=None: {name!r} has a LayerScale; without one it is init_values=0")
    return model


def check_activation(name: str, overrides: Mapping = {}) -> None:
    """Raise `ValueError` for a timm name whose weights were trained with QuickGELU, where its model has the
    exact GELU (17 tags of CLIP's kind), unless `overrides` choose an `act_layer`."""
    published = timm.get_pretrained_cfg(name) if _is_in_timm(name) else None
    notes = " ".join(getattr(published, "notes", None) or ())
    if "QuickGELU" in notes and "quickgelu" not in name and overrides.get("act_layer") is None:
        right = name.replace("_clip_", "_clip_quickgelu_")
        raise ValueError(f"the weights of {name!r} were trained with QuickGELU: take {right!r}")


def weights_file(name: str) -> Path:
    """Where a safetensors file for the timm model `name` is looked for before anything is downloaded."""
    return Path(torch.hub.get_dir()) / "checkpoints" / f"{name}.safetensors"


def _is_in_timm(name: str) -> bool:
    try:
        timm.get_pretrained_cfg(name)
    except RuntimeError:  # a model that timm knows, with a tag after the dot that it does not
        return False
    return timm.is_model(name)


def _with_weights(name: str, overrides: Mapping) -> torch.nn.Module:
    by_hand = weights_file(name)
    published = timm.get_pretrained_cfg(name)
    where = getattr(published, "hf_hub_id", None) or getattr(published, "url", None)
    try:
        if by_hand.exists():
            overrides = {**overrides, "pretrained_cfg_overlay": {"file": str(by_hand)}}
        elif published is not None and published.hf_hub_id:
            _reach_hub(published.hf_hub_id)
        return timm.create_model(name, **overrides)
    except (TypeError, AssertionError):
        raise  # a wrong constructor argument is not a download problem
    except Exception as error:  # which one a failed download raises depends on the versions of libraries
        if by_hand.exists():
            problem = f"the weights in {by_hand} could not be loaded into {name!r} ({error})"
        elif where:
            problem = f"the weights of {name!r} cannot be had from {where} ({error}): place them at {by_hand}"
        else:
            problem = f"timm publishes no weights for {name!r}: timm.list_pretrained() lists others"
        raise WeightsUnavailable(problem) from error


def _reach_hub(hub_id: str) -> None:
    """Ask the hub once, where weights are not in its cache: a download would try each of several files six
    times before it says that there is no network."""
    from huggingface_hub import constants, snapshot_download  # comes with timm
    from huggingface_hub.utils import LocalEntryNotFoundError, get_session

    repository, _, revision = hub_id.partition("@")
    try:
        snapshot_download(repository, revision=revision or None, local_files_only=True)
    except LocalEntryNotFoundError:  # proxies and mirrors count
        get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)


class Architecture(NamedTuple):
    """What `create_vit` needs to build a model: its name or mapping, and JSON-valued further arguments."""

    name: str | Mapping
    overrides: Mapping = {}

    def build(self) -> VisionTransformer:
        return create_vit(self.name, **self.overrides)

    def build_classifier(self) -> torch.nn.Module:
        """The same, where it need not be a ViT."""
        return create_classifier(self.name, **self.overrides)

    @classmethod
    def read(cls, described: object) -> "Architecture":
        """The architecture that a file, perhaps a stranger's, names; nothing is built. Raises `ValueError`
        for anything but a name, plain arguments, and sizes that a ViT has."""
        if not isinstance(described, Mapping) or not {"name"} <= described.keys() <= {"name", "overrides"}:
            raise ValueError(f"{_short(described)}: an architecture has a name and overrides")
        name, overrides = described["name"], described.get("overrides", {})
        has_name = isinstance(name, str) and (name in PRESETS or _is_in_timm(name))
        if not (has_name or isinstance(name, Mapping)) or not isinstance(overrides, Mapping):
            raise ValueError(f"{_short(described)}: a name of timm's or a mapping, and overrides")
        arguments = {**(PRESETS.get(name, {}) if has_name else name), **overrides}
        for argument, value in arguments.items():
            _check_plain(argument, value)
        _check_size(arguments)
        return cls(name, overrides)

    def require_numbers(self, numbers: int) -> None:
        """Raise `ValueError`, before memory is taken, where the model has more weights than its file has
        `numbers`, or keeps more beside them than any ViT does."""
        try:
            with without_weights():
                model = self.build_classifier()
        except (RuntimeError, NotImplementedError):  # a RegNet of timm 1.0.26 cannot be built so
            return
        weights = sum(value.numel() for value in model.state_dict().values())
        if weights > numbers:
            short = _short(dict(self.overrides) or self.name)
            raise ValueError(f"{short} has {weights:,} weights, its file {numbers:,}")
        if (buffers := sum(buffer.numel() for buffer in model.buffers())) > 2**28:
            raise ValueError(f"it would keep {buffers:,} numbers beside its weights: at most {2**28:,}")


def _check_plain(argument: str, value: Any) -> None:
    """Raise `ValueError` for an argument that a file may not name, and for what is no plain value."""
    largest = SIZES_OF_FILES.get(argument)
    if largest is None and argument not in OTHERS_OF_FILES:
        raise ValueError(f"{_short(argument)} is no argument that a file may name")
    least, most = (-(2**20), 2**20) if largest is None else (0, largest)
    for item in value if isinstance(value, (list, tuple)) and len(value) <= 16 else [value]:
        word = largest is None and isinstance(item, str) and re.fullmatch(r"[\w.-]{0,40}", item)
        number = isinstance(item, (int, float)) and least <= item <= most  # also True and False
        if not (item is None or word or number):
            words = "" if largest is not None else " or a short word"
            raise ValueError(f"{argument}={_short(value)}: a number from {least:,} to {most:,}{words}")


def _check_size(arguments: Mapping[str, Any]) -> None:
    """Raise `ValueError` for a ViT of more weights or patches than any has, where its arguments say it."""
    sizes = {name: value for name, value in arguments.items() if isinstance(value, (int, float))}
    width, ratio = sizes.get("embed_dim", 0), sizes.get("mlp_ratio", 4)
    weights = width * sizes.get("depth", 12) * width * (4 + 2 * ratio) + width * sizes.get("num_classes", 0)
    if weights > MOST_WEIGHTS:
        raise ValueError(f"it would have {weights:,.0f} weights: at most {MOST_WEIGHTS:,}")
    size, patch = _numbers(arguments.get("img_size")), _numbers(arguments.get("patch_size"))
    if size and patch and (patches := (max(size) / min(patch)) ** 2) > MOST_PATCHES:
        raise ValueError(f"it would have {patches:,.0f} patches: at most {MOST_PATCHES:,}")


def _numbers(value: Any) -> list[float]:
    return [item for item in (value if isinstance(value, (list, tuple)) else [value]) if item]


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
