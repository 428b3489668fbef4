"""Distill a teacher's attention with Lightning (`pip install lightning`)."""

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from atlib import AttentionTransfer, Normalisation, Plan, create_student, create_vit


class Distilling(LightningModule):
    """A pair and its loss; the task's and the transfer loss are logged apart."""

    def __init__(self, pair: AttentionTransfer):
        super().__init__()
        self.pair = pair

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
        images, labels = batch
        logits, transfer_loss = self.pair(images)
        task_loss = nn.functional.cross_entropy(logits, labels)
        self.log_dict({"task_loss": task_loss, "transfer_loss": transfer_loss}, prog_bar=True)
        return task_loss + 3.0 * transfer_loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # the student's weights alone: a pair does not register its teacher
        return torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.05)


def main(epochs: int = 2) -> nn.Module:
    """Train a student, and return it: an ordinary ViT of timm, which needs its teacher no more."""
    torch.manual_seed(0)
    # yours: any Dataset of (image, label); here noise of 32 x 32 pixels
    data = TensorDataset(torch.randn(64, 3, 32, 32), torch.randint(5, (64,)))
    # a real one: atlib.load_teacher("vit_small_patch14_dinov2.lvd142m", image_size=224).vit
    teacher = create_vit("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=4, num_classes=0)
    student = create_student(teacher, num_classes=5)
    plan = Plan(how="distill", layers=range(3))
    normalisation = Normalisation(0.5, 0.5)  # of your images; they are normalised anew for the teacher
    pair = AttentionTransfer(teacher, student, plan, normalisation=normalisation)

    trainer = Trainer(max_epochs=epochs, logger=False, enable_checkpointing=False)
    trainer.fit(Distilling(pair), DataLoader(data, batch_size=16, shuffle=True))
    return student


if __name__ == "__main__":
    main()
