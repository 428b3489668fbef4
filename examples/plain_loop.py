"""Distill a teacher's attention in a loop of your own: what attention transfer adds to it is two lines."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from atlib import AttentionTransfer, Normalisation, Plan, create_student, create_vit


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

    device = "cuda" if torch.cuda.is_available() else "cpu"
    pair.to(device).train()  # the teacher moves along, and stays frozen and in eval mode
    # the student's, and a head mapping's where the plan learns one; the teacher's are not among them
    optimizer = torch.optim.AdamW(pair.parameters(), lr=1e-3, weight_decay=0.05)
    for epoch in range(epochs):
        for images, labels in DataLoader(data, batch_size=16, shuffle=True):
            logits, transfer_loss = pair(images.to(device))
            task_loss = nn.functional.cross_entropy(logits, labels.to(device))
            loss = task_loss + 3.0 * transfer_loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: task loss {task_loss.item():.3f}, transfer loss {transfer_loss.item():.3f}")
    return student


if __name__ == "__main__":
    main()
