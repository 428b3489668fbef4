"""A small ViT for scenes, and a detector whose answers are known."""

from types import SimpleNamespace

import torch
from torch import nn

from atfamily.detection.objects import Found
from atlib import create_vit


def scene_vit(seed=0, **options):
    """For images of 64 pixels, 8 x 8 patches."""
    torch.manual_seed(seed)
    sizes = {"embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 0}
    return create_vit("scenes", **sizes | options)


class Knows(nn.Module):
    """A detector that knows an image when it sees it, and says of it what is there, moved to the right."""

    def __init__(self, images, moved=0, masks=True):
        super().__init__()
        self.weight, self.heads = nn.Parameter(torch.zeros(1)), SimpleNamespace(masks=masks)
        self.known, self.moved = [images.one(number, None) for number in range(len(images))], moved

    def forward(self, batch):
        assert not self.training
        return SimpleNamespace(found=[self.said(image) for image in batch])

    def said(self, image):
        true = next(objects for pixels, objects in self.known if torch.equal(pixels, image))
        masks = torch.roll(true.masks, self.moved, -1) if self.heads.masks else None
        boxes = true.boxes + self.moved * torch.tensor([1.0, 0, 1, 0])
        boxes = boxes.clamp(max=true.masks.shape[-1])  # nothing is said outside an image
        return Found(boxes, true.labels, torch.ones(len(true.labels)), masks)
