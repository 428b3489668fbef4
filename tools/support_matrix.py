"""Which models `walk` sees, and which can teach: `python -m tools.support_matrix [--again] [--only WORD]`.

Every ViT of timm and one model for each class of transformers, torchvision and open_clip is built with random
weights, and some models beyond them; nothing is downloaded. Of timm's models two blocks of two heads and
images of a few patches are enough, because all blocks and heads of one compute the same; one that cannot be
narrowed is as wide as it is. Each is walked and compared with its own output, then copied from and distilled
from for one step, into a second model like it. The record is `results/support_matrix.json`, which the page
book/any-teacher.md reads; a run that was stopped goes on where it was.
"""

import argparse
import gc
import json
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import timm
import torch
from timm.layers import weight_init
from timm.models import _registry
from torch import nn

from atlib import AttentionTransfer, Plan, walk
from atlib._util import in_eval_mode, write_atomically
from atlib.attention import outputs
from atlib.compatibility import example_of
from tools.other_libraries import beyond, models

RECORD = Path(__file__).resolve().parents[1] / "results" / "support_matrix.json"
# The files of timm in which plain ViTs are: attention over all tokens, in blocks one after another.
FILES = {
    "beit",
    "deit",
    "eva",
    "naflexvit",
    "vision_transformer",
    "vision_transformer_hybrid",
    "vision_transformer_relpos",
    "vision_transformer_sam",
}
LIBRARIES = ("torch", "timm", "transformers", "torchvision", "open_clip_torch")
CLASSES = 5
LARGEST = 400_000_000  # parameters of a model that is built as it is; larger ones can fill a laptop's memory


def main() -> None:
    """Try what is not in the record yet, and write the record after each model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--again", action="store_true", help="begin with an empty record")
    parser.add_argument("--only", default="", help="only models with this word in their name, again")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    weight_init._trunc_normal_ = lambda tensor, *_: tensor  # weights are drawn anew, and this is slow
    record = {"versions": {name: version(name) for name in LIBRARIES}, "models": {}}
    if RECORD.exists() and not given.again:
        old = json.loads(RECORD.read_text())
        if old["versions"] == record["versions"]:  # other versions: begin anew
            record = old
    for name, build in all_models():
        if given.only in name and (given.only or name not in record["models"]):
            record["models"][name] = tried(build)
            print(name, record["models"][name], flush=True)
            write_atomically(RECORD, (json.dumps(record, indent=1) + "\n").encode())
            gc.collect()


def all_models() -> Iterator[tuple[str, Callable[[bool], nn.Module]]]:
    """Every model by name, with what builds it, narrow or as it is."""
    for name, build in (models() | beyond()).items():
        yield name, lambda narrow, build=build: build()
    for name in timm.list_models():
        entry = _registry._model_entrypoints[name]
        if entry.__module__.split(".")[-1] in FILES:
            yield f"timm {name}", partial(small, name)


def small(name: str, narrow: bool) -> nn.Module:
    """A timm model with its first two blocks, on images of 4 x 4 patches where it takes them; `narrow`: with
    two of its heads, of their own width."""
    for options in ({"depth": 2}, {}):
        try:
            with torch.device("meta"):
                model = timm.create_model(name, num_classes=CLASSES, **options)
            break
        except (TypeError, AssertionError, ValueError, IndexError):
            continue
    embed = getattr(model, "patch_embed", None)
    if not (embed is None or hasattr(embed, "backbone")):
        options |= {"img_size": tuple(4 * side for side in embed.patch_size)}
    attention = next((part for part in model.modules() if hasattr(part, "num_heads")), None)
    if narrow and attention is not None and hasattr(model, "embed_dim"):
        options |= {"num_heads": 2, "embed_dim": 2 * (model.embed_dim // attention.num_heads)}
    elif (count := sum(parameter.numel() for parameter in model.parameters())) > LARGEST:
        raise MemoryError(f"not tried: it cannot be narrowed, and has {count:,} parameters")
    return timm.create_model(name, num_classes=CLASSES, **options)


def randomised(model: nn.Module) -> nn.Module:
    """Random values at which everything matters: no zero tokens, no layer scale of 1e-5, no flat maps."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            kind = name.split(".")[-1]
            if kind in ("weight", "gamma", "gamma_1", "gamma_2", "lambda1") and parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
            elif kind == "weight":
                parameter.normal_(std=parameter[0].numel() ** -0.5)
            else:
                parameter.normal_(std=0.3)
    return model


def tried(build: Callable[[bool], nn.Module]) -> dict[str, Any]:
    """What one model can do: {"class", "layers", "difference", "copy", "distill", "why"}, the last where one
    fails. Narrow first, which is quick; a model that cannot be narrowed, as it is."""
    for narrow in (True, False):
        torch.manual_seed(0)
        row: dict[str, Any] = {"class": "?", "layers": 0, "copy": False, "distill": False}
        try:
            model = randomised(build(narrow)).eval()
            row["class"] = type(model).__name__
            example = example_of(model)
            with torch.no_grad(), in_eval_mode(model):
                expected, result = outputs(model, example), walk(model, example)
            row["layers"] = len(result.layers)
            row["difference"] = ((result.logits - expected).abs().max() / expected.abs().max()).item()
            student = randomised(build(narrow))
            for how in ("copy", "distill"):
                row[how] = one_step(model, student, example, how)
            return row
        except (TypeError, ValueError, RuntimeError, AssertionError, MemoryError, AttributeError) as error:
            row["why"] = " ".join(str(error).split())[:400]
    return row


def one_step(teacher: nn.Module, student: nn.Module, images: torch.Tensor, how: str) -> bool:
    """Whether a step of a pair is finite and moves the student alone."""
    pair = AttentionTransfer(teacher, student, Plan(how=how)).train()
    student.zero_grad(set_to_none=True)
    logits, loss = pair(images)
    (logits.square().mean() + loss).backward()
    moved = [weight.grad for weight in student.parameters() if weight.grad is not None]
    still = all(weight.grad is None for weight in teacher.parameters())
    return bool(moved and still and all(grad.isfinite().all() for grad in moved))


if __name__ == "__main__":
    main()
