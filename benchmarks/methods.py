"""What `transfer_step.py` compares: how each method's module is built, the fewest FLOPs it needs, and one
optimiser step."""

from collections.abc import Callable
from typing import NamedTuple

import flops
import torch
from dense_baseline import DenseTransfer
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from atlib import AttentionTransfer, Plan, create_vit
from atlib.baselines import FeatureDistillation
from atlib.cast_once import CastOnce
from atlib.objectives import outputs
from atlib.recipe import Recipe
from atlib.train import make_optimizer

# The rate is so small that thousands of steps change nothing: the time of a step must not depend on how far a
# run has come.
RECIPE = Recipe(lr=1e-9, clip=1.0)
CLASSES = 1000


class Method(NamedTuple):
    """A method whose step is measured."""

    # Its name in the table.
    title: str
    # (teacher, student) -> module.
    build: Callable[[VisionTransformer, VisionTransformer], nn.Module]
    # Shape -> the fewest FLOPs per image.
    least: Callable[[flops.Shape], int]
    # How many of the teacher's blocks the method needs to run.
    teacher_blocks: int


class Step(NamedTuple):
    """Everything a step needs besides the method."""

    student: VisionTransformer
    teacher: VisionTransformer | None
    optimizer: torch.optim.Optimizer
    images: Tensor
    labels: Tensor
    autocast: bool


def known_methods(depth: int) -> dict[str, Method]:
    """All methods for a ViT of this depth, in the order of the table; the others are compared with the
    first."""
    part = 3 * depth // 4
    first = f"first {part} of {depth} layers"

    def ours(**plan):
        return lambda teacher, student: AttentionTransfer(teacher, student, Plan(**plan))

    def dense(how, layers):
        return lambda teacher, student: DenseTransfer(teacher, student, how, range(layers))

    return {
        "fine-tune": Method("fine-tuning", lambda teacher, student: student, flops.fine_tuning, 0),
        "copy": Method("Copy, all layers", ours(how="copy"), flops.copy, depth),
        "distill": Method("Distill, all layers", ours(how="distill"), flops.distill, depth),
        "distill-part": Method(
            f"Distill, {first}",
            ours(how="distill", layers=range(part)),
            lambda shape: flops.distill(shape, part),
            part,
        ),
        "q-copy": Method("Q-copy, all layers", ours(what="q", how="copy"), flops.query_copy, depth),
        "features": Method("feature distillation", FeatureDistillation, flops.feature_distillation, depth),
        "dense-copy": Method("dense Copy, all layers", dense("copy", depth), flops.copy, depth),
        "dense-distill-part": Method(
            f"dense Distill, {first}", dense("distill", part), lambda shape: flops.distill(shape, part), part
        ),
    }


def make_step(
    model: str, image_size: int, batch: int, device: torch.device, *, teacher: bool, autocast: bool
) -> Step:
    """Student, teacher (if asked for), AdamW and one batch of noise on `device`. Both models are freshly
    initialised: time depends on shapes alone."""
    torch.manual_seed(0)
    with device:  # initialised on the device: on the CPU a ViT-L takes longer than all of its steps on a GPU
        student = create_vit(model, img_size=image_size, num_classes=CLASSES).train()
        teaching = create_vit(model, img_size=image_size, num_classes=CLASSES) if teacher else None
    images = torch.randn(batch, 3, image_size, image_size, device=device)
    labels = torch.randint(CLASSES, (batch,), device=device)
    optimizer = make_optimizer(student, RECIPE, fused=device.type == "cuda")
    return Step(student, teaching, optimizer, images, labels, autocast)


def loss_of(step: Step, module: nn.Module, cast: CastOnce) -> Tensor:
    """Cross-entropy plus λ times the transfer loss of one batch: a scalar. cast: of the module, as `train`
    has it."""
    device = step.images.device
    with torch.autocast(device.type, torch.bfloat16, enabled=step.autocast), cast.in_use(device):
        logits, transfer_loss = outputs(module, step.images)
        return nn.functional.cross_entropy(logits, step.labels) + RECIPE.transfer_weight * transfer_loss


def optimise(step: Step, module: nn.Module, cast: CastOnce) -> None:
    """One optimiser step: forward, backward, AdamW, gradients dropped."""
    loss_of(step, module, cast).backward()
    step.optimizer.step()
    step.optimizer.zero_grad(set_to_none=True)
