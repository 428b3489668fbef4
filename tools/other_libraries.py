"""Small models of other libraries that `walk` knows, of random weights, built from their configurations: for
the tests of the adapters and for the support matrix. Nothing is downloaded."""

from collections.abc import Callable, Mapping

import torch
from torch import nn

IMAGE, PATCH, WIDTH, LAYERS, HEADS, HIDDEN, CLASSES = 32, 8, 24, 3, 3, 48, 5


def models(attention: str = "sdpa") -> Mapping[str, Callable[[], nn.Module]]:
    """What builds each model, by "library class"; `attention`: "sdpa" or "eager", for those of
    transformers."""
    return {
        **{f"transformers {name}": build for name, build in _of_transformers(attention).items()},
        "torchvision VisionTransformer": _of_torchvision,
        "open_clip VisionTransformer": _of_open_clip,
        "open_clip VisionTransformer, mean of patches": lambda: _of_open_clip(pool_type="avg"),
        "open_clip VisionTransformer, layer scale and QuickGELU": lambda: _of_open_clip(quick=True),
    }


def _of_transformers(attention: str) -> Mapping[str, Callable[[], nn.Module]]:
    import transformers as hf

    sizes = {
        "image_size": IMAGE,
        "patch_size": PATCH,
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "intermediate_size": HIDDEN,
        "num_labels": CLASSES,
    }

    def build(model: type[nn.Module], config: type, **changes) -> Callable[[], nn.Module]:
        def made() -> nn.Module:
            chosen = config(**{**sizes, **changes}, attn_implementation=attention)
            return model(chosen)

        return made

    def with_text(model: type[nn.Module], config: type) -> Callable[[], nn.Module]:
        text = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}

        def made() -> nn.Module:
            chosen = config(text_config=text, vision_config=sizes, num_labels=CLASSES)
            chosen._attn_implementation = attention
            chosen.vision_config._attn_implementation = attention
            return model(chosen)

        return made

    each, shared = {"use_relative_position_bias": True}, {"use_shared_relative_position_bias": True}
    dino = {"mlp_ratio": HIDDEN // WIDTH, "layerscale_value": 0.5}
    data2vec = {"layer_scale_init_value": 0.5}
    return {
        "ViTModel": build(hf.ViTModel, hf.ViTConfig),
        "ViTForImageClassification": build(hf.ViTForImageClassification, hf.ViTConfig),
        "DeiTModel": build(hf.DeiTModel, hf.DeiTConfig),
        "DeiTForImageClassification": build(hf.DeiTForImageClassification, hf.DeiTConfig),
        "DeiTForImageClassificationWithTeacher": build(
            hf.DeiTForImageClassificationWithTeacher, hf.DeiTConfig
        ),
        "ViTMAEModel": build(hf.ViTMAEModel, hf.ViTMAEConfig, mask_ratio=0.0),
        "Dinov2Model": build(hf.Dinov2Model, hf.Dinov2Config, **dino),
        "Dinov2ForImageClassification": build(hf.Dinov2ForImageClassification, hf.Dinov2Config, **dino),
        "Dinov2Model, gated MLP": build(hf.Dinov2Model, hf.Dinov2Config, use_swiglu_ffn=True, **dino),
        "Dinov2WithRegistersModel": build(
            hf.Dinov2WithRegistersModel, hf.Dinov2WithRegistersConfig, num_register_tokens=2, **dino
        ),
        "Dinov2WithRegistersForImageClassification": build(
            hf.Dinov2WithRegistersForImageClassification,
            hf.Dinov2WithRegistersConfig,
            num_register_tokens=2,
            **dino,
        ),
        "DINOv3ViTModel": build(hf.DINOv3ViTModel, hf.DINOv3ViTConfig, num_register_tokens=2),
        "DINOv3ViTModel, gated MLP": build(
            hf.DINOv3ViTModel, hf.DINOv3ViTConfig, use_gated_mlp=True, hidden_act="silu"
        ),
        "CLIPVisionModel": build(hf.CLIPVisionModel, hf.CLIPVisionConfig),
        "CLIPVisionModelWithProjection": build(hf.CLIPVisionModelWithProjection, hf.CLIPVisionConfig),
        "CLIPForImageClassification": with_text(hf.CLIPForImageClassification, hf.CLIPConfig),
        "SiglipVisionModel": build(hf.SiglipVisionModel, hf.SiglipVisionConfig),
        "SiglipForImageClassification": with_text(hf.SiglipForImageClassification, hf.SiglipConfig),
        "BeitModel": build(hf.BeitModel, hf.BeitConfig, **each),
        "BeitModel, one bias for all layers": build(hf.BeitModel, hf.BeitConfig, **shared),
        "BeitModel, positions": build(hf.BeitModel, hf.BeitConfig, use_absolute_position_embeddings=True),
        "BeitForImageClassification": build(hf.BeitForImageClassification, hf.BeitConfig, **each),
        "Data2VecVisionModel": build(hf.Data2VecVisionModel, hf.Data2VecVisionConfig, **each, **data2vec),
        "Data2VecVisionForImageClassification": build(
            hf.Data2VecVisionForImageClassification, hf.Data2VecVisionConfig, **each, **data2vec
        ),
    }


def _of_torchvision() -> nn.Module:
    from torchvision.models.vision_transformer import VisionTransformer

    model = VisionTransformer(IMAGE, PATCH, LAYERS, HEADS, WIDTH, HIDDEN, num_classes=CLASSES)
    torch.nn.init.normal_(model.heads.head.weight)  # it starts at 0, which would hide all mistakes
    return model


def _of_open_clip(quick: bool = False, **changes) -> nn.Module:
    from open_clip.transformer import QuickGELU, VisionTransformer

    more = {"act_layer": QuickGELU, "ls_init_value": 0.5} if quick else {}
    return VisionTransformer(
        IMAGE, PATCH, WIDTH, LAYERS, HEADS, HIDDEN / WIDTH, output_dim=CLASSES, **more, **changes
    )
