"""Small models of other libraries than timm, of random weights, built from their configurations: for tests
and the support matrix. Nothing is downloaded."""

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

    bias, shared = {"use_relative_position_bias": True}, {"use_shared_relative_position_bias": True}
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
        "BeitModel": build(hf.BeitModel, hf.BeitConfig, **bias),
        "BeitModel, one bias for all layers": build(hf.BeitModel, hf.BeitConfig, **shared),
        "BeitModel, positions": build(hf.BeitModel, hf.BeitConfig, use_absolute_position_embeddings=True),
        "BeitForImageClassification": build(hf.BeitForImageClassification, hf.BeitConfig, **bias),
        "Data2VecVisionModel": build(hf.Data2VecVisionModel, hf.Data2VecVisionConfig, **bias, **data2vec),
        "Data2VecVisionForImageClassification": build(
            hf.Data2VecVisionForImageClassification, hf.Data2VecVisionConfig, **bias, **data2vec
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


def beyond() -> Mapping[str, Callable[[], nn.Module]]:
    """Models that are no plain Vision Transformers: of language, of video, in stages."""
    import timm
    import transformers as hf

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    words = {**sizes, "vocab_size": 50}
    clips = {**sizes, "image_size": IMAGE, "patch_size": PATCH, "num_frames": 4, "num_labels": CLASSES}
    return {
        "beyond Llama, grouped queries": lambda: hf.LlamaForCausalLM(
            hf.LlamaConfig(**words, num_key_value_heads=2)
        ),
        "beyond GPT-2": lambda: hf.GPT2LMHeadModel(
            hf.GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4, n_positions=16)
        ),
        "beyond BERT": lambda: hf.BertForSequenceClassification(hf.BertConfig(**words, num_labels=CLASSES)),
        "beyond VideoMAE": lambda: hf.VideoMAEForVideoClassification(hf.VideoMAEConfig(**clips)),
        "beyond ViViT": lambda: hf.VivitForVideoClassification(
            hf.VivitConfig(**clips, tubelet_size=[2, PATCH, PATCH])
        ),
        "beyond I-JEPA": lambda: hf.IJepaForImageClassification(
            hf.IJepaConfig(**sizes, image_size=IMAGE, patch_size=PATCH, num_labels=CLASSES)
        ),
        "beyond MSN": lambda: hf.ViTMSNForImageClassification(
            hf.ViTMSNConfig(**sizes, image_size=IMAGE, patch_size=PATCH, num_labels=CLASSES)
        ),
        "beyond Swin": lambda: timm.create_model(
            "swin_tiny_patch4_window7_224", img_size=64, window_size=4, num_classes=CLASSES
        ),
        "beyond PVT, fewer keys than queries": lambda: timm.create_model("pvt_v2_b0", num_classes=CLASSES),
        "beyond CaiT": lambda: timm.create_model("cait_xxs24_224", depth=2, num_classes=CLASSES),
        "beyond ResNet": lambda: timm.create_model("resnet18", num_classes=CLASSES),
    }
