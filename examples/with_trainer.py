"""Distill a teacher's attention with the Trainer of Hugging Face (`pip install transformers`)."""

import tempfile

import torch
from torch import nn
from torch.utils.data import TensorDataset
from transformers import Trainer, TrainingArguments

from atlib import AttentionTransfer, Normalisation, Plan, create_student, create_vit


class Distilling(nn.Module):
    """What a Trainer trains: a module that takes a batch by its columns' names, and returns the loss."""

    def __init__(self, pair: AttentionTransfer):
        super().__init__()
        self.pair = pair

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits, transfer_loss = self.pair(pixel_values)
        task_loss = nn.functional.cross_entropy(logits, labels)
        return {"loss": task_loss + 3.0 * transfer_loss, "logits": logits}


def collate(examples: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Some (image, label) as a batch."""
    images, labels = zip(*examples)
    return {"pixel_values": torch.stack(images), "labels": torch.stack(labels)}


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

    with tempfile.TemporaryDirectory() as folder:  # one of yours, with save_strategy="epoch", keeps weights
        options = {"report_to": "none", "save_strategy": "no", "learning_rate": 1e-3}
        arguments = TrainingArguments(
            folder, num_train_epochs=epochs, per_device_train_batch_size=16, **options
        )
        Trainer(Distilling(pair), arguments, data_collator=collate, train_dataset=data).train()
    return student


if __name__ == "__main__":
    main()
