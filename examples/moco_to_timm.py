"""MoCo-v3's pre-training checkpoint as a teacher's file: its base encoder, which its authors evaluate.

python examples/moco_to_timm.py vit-b-300ep.pth.tar moco-vit-base.safetensors"""

import sys

import torch

from atlib.checkpoint import save_vit
from atlib.pair import IMAGENET, attach
from atlib.vit import Architecture

PREFIX = "module.base_encoder."
# github.com/facebookresearch/moco-v3, vits.py: its ViT-S has 12 heads
NAMES = {384: ("vit_small_patch16_224", {"num_heads": 12}), 768: ("vit_base_patch16_224", {})}


def to_timm(tensors):
    """The base encoder among {"module.base_encoder.cls_token": tensor, ...} as a timm ViT's weights."""
    encoder = {name.removeprefix(PREFIX): value for name, value in tensors.items() if name.startswith(PREFIX)}
    return {name: value for name, value in encoder.items() if not name.startswith("head.")}


if __name__ == "__main__":
    source, out = sys.argv[1:]
    state = to_timm(torch.load(source, map_location="cpu", weights_only=True)["state_dict"])
    name, overrides = NAMES[state["cls_token"].shape[-1]]
    architecture = Architecture(name, overrides | {"num_classes": 0})
    vit = architecture.build()
    vit.load_state_dict(state)
    attach(vit, IMAGENET)  # as main_moco.py normalises
    print(save_vit(out, vit, architecture))
