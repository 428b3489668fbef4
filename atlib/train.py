"""The one training loop: pre-training, scratch, fine-tuning, Copy and Distill all run through it."""

import math
from collections.abc import Callable
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import set_seed
from timm.optim import create_optimizer_v2
from torch import Tensor, nn
from tqdm import tqdm

from atlib.checkpoint import save_weights
from atlib.data import Images
from atlib.recipes import Recipe
from atlib.transfer import Transferred

Loss = Callable[[nn.Module, Tensor, Tensor, Recipe], Tensor]  # (model, images, targets, recipe) -> scalar


class NonFiniteLoss(RuntimeError):
    """The loss or its gradient became NaN or infinite; the message names the step and the last good checkpoint."""


def outputs(model: nn.Module, images: Tensor) -> Transferred:
    """A model's output in the one form that training and evaluation use: a plain classifier has a transfer loss of 0."""
    output = model(images)
    return output if isinstance(output, Transferred) else Transferred(output, output.new_zeros(()))


def student_loss(model: nn.Module, images: Tensor, labels: Tensor, recipe: Recipe) -> Tensor:
    """task_weight · task loss + λ · transfer loss: cross-entropy with label smoothing, plus what is distilled."""
    logits, transfer_loss = outputs(model, images)
    task_loss = nn.functional.cross_entropy(logits, labels, label_smoothing=recipe.label_smoothing)
    return recipe.task_weight * task_loss + recipe.transfer_weight * transfer_loss


def train(model: nn.Module, data: Images, recipe: Recipe, *, loss: Loss = student_loss, seed: int = 0,
          evaluate: Callable[[nn.Module], dict] | None = None, evaluate_every: int = 0, out: Path | None = None, progress: str | None = "training",
          cpu: bool = False) -> list[dict]:
    """Train `model` in place for `recipe.steps` steps and return one dict of metrics per pass over the data.

    It trains on the accelerator if there is one (not with `cpu=True`) and is back on its own device afterwards.
    `seed` fixes order, augmentation and stochastic depth: on one CPU with one number of threads a run repeats bit for bit; on a GPU
    the attention and convolution kernels may sum in another order. It seeds torch's global generator. `evaluate(model)`, if
    given, adds its metrics after the last pass, and after every `evaluate_every`-th where that is above 0. With `out`, the
    last good weights are kept in `out/last.safetensors` once per pass.
    Raises `ValueError` for a model without a classifier that is to learn labels, and `NonFiniteLoss` as soon as the loss or its gradient
    is not finite; the model then still holds the last finite step's weights.
    """
    if loss is student_loss and recipe.task_weight > 0 and getattr(getattr(model, "student", model), "num_classes", None) == 0:
        raise ValueError("the model has no classifier (num_classes=0), so there are no logits to train: build it with num_classes=, "
                         "or call reset_classifier with the number of classes")
    set_seed(seed)
    home = next(model.parameters()).device
    AcceleratorState._reset_state()  # Accelerate keeps a precision for the whole process; this run may want another
    accelerator = Accelerator(mixed_precision=recipe.mixed_precision, cpu=cpu, step_scheduler_with_optimizer=False)
    per_process = max(1, recipe.batch_size // accelerator.num_processes)
    optimizer = make_optimizer(model, recipe)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule(step, recipe))
    model, optimizer, loader = accelerator.prepare(model.train(), optimizer, data.loader(per_process, seed=seed))

    history, step, kept = [], 0, "none was kept: pass out="
    bar = tqdm(total=recipe.steps, desc=progress, disable=progress is None or not accelerator.is_main_process, mininterval=2.0, ncols=80)
    while step < recipe.steps:
        total, count = torch.zeros((), device=accelerator.device), 0
        for images, targets in loader:
            with accelerator.autocast():
                value = loss(model, images, targets, recipe)
            if torch.isfinite(value):
                accelerator.backward(value)
                norm = accelerator.clip_grad_norm_(model.parameters(), recipe.clip)
            # One step with a NaN gradient would ruin all weights. In fp16 it is normal: Accelerate then skips the step.
            if not torch.isfinite(value) or not torch.isfinite(norm) and recipe.mixed_precision != "fp16":
                what = "gradient" if torch.isfinite(value) else "loss"
                raise NonFiniteLoss(f"the {what} is {(norm if what == 'gradient' else value).item()} at step {step} "
                                    f"(lr {scheduler.get_last_lr()[0]:.3g}); last good checkpoint: {kept}. "
                                    "Lower lr, clip harder, or use mixed_precision='no'.")
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            total, count, step = total + value.detach(), count + 1, step + 1
            bar.update()
            if step == recipe.steps:
                break
        history.append({"epoch": len(history) + 1, "step": step, "loss": (total / count).item(), "lr": scheduler.get_last_lr()[0]})
        if evaluate is not None and (step == recipe.steps or evaluate_every and len(history) % evaluate_every == 0):
            history[-1].update(evaluate(accelerator.unwrap_model(model)))
        if out is not None and accelerator.is_main_process:
            kept = save_weights(Path(out) / "last.safetensors", accelerator.unwrap_model(model))
    bar.close()
    trained = accelerator.unwrap_model(model, keep_fp32_wrapper=False).to(home)
    vars(trained).pop("forward", None)  # Accelerate's autocast around the class's own forward, of no use after training
    return history


def schedule(step: int, recipe: Recipe) -> float:
    """The factor on the peak lr at `step` (from 0): linear warm-up, then a half cosine down to min_lr."""
    warmup = round(recipe.warmup * recipe.steps)
    if step < warmup:
        return (step + 1) / warmup
    floor = recipe.min_lr / recipe.lr
    done = (step - warmup) / max(1, recipe.steps - warmup)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done))


def make_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """AdamW over the student's weights, grouped by timm: no decay on biases, norms, positions and tokens; lr by layer.

    A departure from MAE's published code (arXiv 2111.06377): with layer decay timm counts the final norm to the last block,
    MAE's code to the head.
    """
    trained = getattr(model, "student", model)
    optimizer = create_optimizer_v2(trained, opt="adamw", lr=recipe.lr, weight_decay=recipe.weight_decay,
                                    layer_decay=recipe.layer_decay, betas=recipe.betas)
    in_student = {id(parameter) for parameter in trained.parameters()}
    beside = [p for p in model.parameters() if id(p) not in in_student and p.requires_grad]
    if beside:  # a projector or a head mapping: thrown away after training, so no layer decay and no special groups
        optimizer.add_param_group({"params": beside, "weight_decay": recipe.weight_decay})
    for group in optimizer.param_groups:  # timm leaves the factor of layer-wise decay to its own schedulers
        group["lr"] = recipe.lr * group.get("lr_scale", 1.0)
    return optimizer
