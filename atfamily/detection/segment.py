"""Which class every pixel has: a linear head on the grid of tokens, and mean intersection over union."""

import torch
from timm.layers import LayerNorm2d
from timm.models import VisionTransformer
from torch import Tensor, nn

from atfamily.detection.objects import ObjectImages
from atfamily.detection.pyramid import GridOfTokens
from atlib._util import in_eval_mode
from atlib.attention_transfer import AttentionTransfer, Transferred
from atlib.data import Images
from atlib.losses import note
from atlib.pair import student_of
from atlib.recipe import Recipe


class Segmenter(nn.Module):
    """A ViT, or an `AttentionTransfer` pair, with a linear head on its last tokens, drawn up to the image.

    `forward(images)` gives the logits of all pixels, (B, classes, height, width), and the pair's transfer
    loss. convolutions: of `size` x `size` places, with norm and GELU, before the linear head. Source: the
    linear protocol of Strudel et al. 2021, "Segmenter" (arXiv 2105.05633), section 3.2; it has none.
    """

    def __init__(
        self, vit: VisionTransformer | AttentionTransfer, classes: int, convolutions: int = 0, size: int = 3
    ):
        super().__init__()
        if size < 1 or size % 2 == 0:
            raise ValueError(f"size={size}: a convolution that stays in its place is 1, 3, 5, ... wide")
        self.backbone, D = GridOfTokens(vit), student_of(vit).embed_dim
        self.neighbours = nn.Sequential()
        for _ in range(convolutions):
            place = nn.Conv2d(D, D, size, padding=size // 2, bias=False)
            self.neighbours.extend([place, LayerNorm2d(D), nn.GELU()])
        self.head = nn.Conv2d(D, classes, 1)

    def no_weight_decay(self) -> set[str]:
        """The backbone's positions and tokens."""
        return {f"backbone.{name}" for name in self.backbone.no_weight_decay()}

    def forward(self, images: Tensor) -> Transferred:
        seen = self.backbone(images)
        logits = nn.functional.interpolate(
            self.head(self.neighbours(seen.grid)), images.shape[-2:], mode="bilinear", align_corners=False
        )
        return Transferred(logits, seen.transfer_loss)


def pixel_images(images: ObjectImages) -> Images:
    """The same images with the class of every pixel as target, int64 (n, height, width): 0 for the background
    and 1 + class elsewhere; of objects that share a pixel the later one has it."""
    classes = torch.zeros(len(images), *images.pixels.shape[-2:], dtype=torch.long)
    for pixels, objects in zip(classes, images.objects, strict=True):
        for label, mask in zip(objects.labels.tolist(), objects.masks):
            pixels[mask] = 1 + label
    return Images(images.pixels, classes, ("background", *images.classes), images.mean, images.std)


def segmentation_loss(model: nn.Module, images: Tensor, classes: Tensor, recipe: Recipe) -> Tensor:
    """Cross-entropy of all pixels' classes (B, height, width), and λ · transfer loss; both are noted as in
    `atlib.objectives.student_loss`."""
    logits, transfer_loss = model(images)
    loss = nn.functional.cross_entropy(logits, classes, label_smoothing=recipe.label_smoothing)
    of_task, transfer_loss = note("task_loss", loss), note("transfer_loss", transfer_loss)
    return recipe.task_weight * of_task + recipe.transfer_weight * transfer_loss


def mean_iou(model: nn.Module, images: Images, classes: int, batch_size: int = 100) -> float:
    """The mean over classes of intersection over union, counted over the pixels of all images; classes that
    neither occur nor are named are left out. The model is left in the mode it was in."""
    device = next(model.parameters()).device
    confusion = torch.zeros(classes, classes, dtype=torch.long)
    with torch.no_grad(), in_eval_mode(model):
        for batch, true in images.loader(batch_size):
            predicted = model(batch.to(device)).logits.argmax(1).cpu()
            confusion += torch.bincount((true * classes + predicted).flatten(), minlength=classes**2).view(
                classes, classes
            )
    both = confusion.diagonal()
    either = confusion.sum(0) + confusion.sum(1) - both
    return (both[either > 0] / either[either > 0]).mean().item()
