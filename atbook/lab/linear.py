"""The study of linear attention: do a teacher's maps reach a student that cannot write them down, and what is
left of a fine-tuned ViT that is given linear attention."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from atbook.lab.scales import ALL_RATES, AXES, RATE_AND_WEIGHT, START, UNTIL_LEARNED
from atbook.lab.study import ACCURACY, Measure, Sources, Variant, study
from atbook.lab.tuning import Range
from atfamily.linear_attention import EluPlusOne, Hedgehog, LinearAttention, LinearTransfer
from atlib._util import in_eval_mode
from atlib.analysis import attention_entropy
from atlib.data import Images
from atlib.objectives import unlabelled_loss
from atlib.pair import student_of

# --- What is measured: accuracy, and how sharp maps are ---


@torch.no_grad()
def _accuracy_and_entropy(model: nn.Module, images: Images) -> dict:
    """Beside the accuracy the mean entropy of all rows of the student's maps, in nats, and of a teacher's."""
    figures, linear, batches, number = ACCURACY.of(model, images), student_of(model), images.loader(500), 0
    sums = {"map_entropy": 0.0} | ({"teacher_map_entropy": 0.0} if model is not linear else {})
    with in_eval_mode(model):
        for batch, _ in batches:
            pairs = batch.ndim == 5
            layers = {"map_entropy": linear.walk(batch[:, 0] if pairs else batch).layers}
            if model is not linear:
                layers["teacher_map_entropy"] = model.teacher_layers(batch[:, 1] if pairs else batch)
            number += len(batch)
            for name, seen in layers.items():
                sums[name] += (
                    len(batch) * sum(attention_entropy(s.map).mean().item() for s in seen) / len(seen)
                )
    return figures | {name: total / number for name, total in sums.items()}


_MEASURED = Measure("accuracy", _accuracy_and_entropy)


# --- Students from scratch ---


def _student(features: type[nn.Module], sources: Sources) -> LinearAttention:
    """The scale's student with linear attention, with the same first weights."""
    return LinearAttention(sources.student(), features)


def _distilled(features: type[nn.Module], what: str, sources: Sources) -> nn.Module:
    return LinearTransfer(sources.teacher(), _student(features, sources), what)


# --- Linear attention for the fine-tuned teacher ---


def _features_alone(what: str, sources: Sources) -> nn.Module:
    """Its weights are kept; features learn from its own softmax attention, without labels."""
    student = LinearAttention(sources.fine_tuned())
    student.model.requires_grad_(False)
    return LinearTransfer(student.model, student, what)


def _then_all(first: str | None, sources: Sources) -> nn.Module:
    """Everything is trained on labels; the features were trained before, as `first` says, or were not."""
    if first is None:
        return LinearAttention(sources.fine_tuned())
    return student_of(sources.model_of(LINEAR, first)).requires_grad_(True)


class LowRank(nn.Module):
    """A frozen weight (out, in) plus learned products of low rank, one for each of `parts` that lie below
    each other in it, such as those of q, k and v. They are 0 at first.

    Source: LoRA, Hu et al. 2021 (arXiv 2106.09685); rank and factor are those of LoLCATs (arXiv 2410.10254).
    """

    def __init__(self, weight: Tensor, parts: int, rank: int = 8, factor: float = 2.0):
        super().__init__()
        rows, columns = weight.shape
        self.up = nn.Parameter(weight.new_zeros(parts, rows // parts, rank))
        self.down = nn.Parameter(torch.randn(parts, rank, columns) / columns**0.5)
        self.factor = factor

    def forward(self, weight: Tensor) -> Tensor:
        """The sum."""
        return weight + self.factor * (self.up @ self.down).flatten(0, 1)


def _then_low_rank(first: str, sources: Sources) -> nn.Module:
    """LoLCATs' second stage: of all that the first one left, updates of low rank alone are trained, on
    labels; of q, k, v and of the projection behind the heads."""
    student = student_of(sources.model_of(LINEAR, first)).requires_grad_(False)
    sources.seed_student()
    for block in student.model.blocks:
        for linear, parts in ((block.attn.qkv, 3), (block.attn.proj, 1)):
            parametrize.register_parametrization(linear, "weight", LowRank(linear.weight, parts))
    return student


# The published factor on the squared error of outputs (there of its mean over layers, here of the sum), which
# is much smaller than a cross-entropy.
OUTPUTS = 1000.0
_RATE_AND_FACTOR = Range(
    {"lr": AXES["lr"], "transfer_weight": (1.0, 10.0, 100.0, OUTPUTS, 10.0 * OUTPUTS)},
    {"lr": START["lr"], "transfer_weight": 100.0},
    {},
    0.0,
)


def _variant(
    name: str,
    build: Callable[[Sources], nn.Module],
    like: str,
    trials: Sequence[Mapping],
    changes: Mapping = {},
    **options,
) -> Variant:
    return Variant(name, build, like, changes, trials, measure=_MEASURED, **options)


def _twin(name: str) -> Variant:
    """Distilled maps of a teacher that sees a twin, with the weight and decay of softmax attention's Distill:
    near their start such students may all stay at guessing."""
    build = partial(_distilled, Hedgehog, "map")
    return _variant(f"distilled maps, {name} twin", build, "distill", UNTIL_LEARNED, twin=name)


def _stages(what: str, plural: str, weight: float) -> tuple[Variant, Variant]:
    first = f"fine-tuned, {plural}"
    alone = {"task_weight": 0.0, "transfer_weight": weight}
    return (
        _variant(
            first,
            partial(_features_alone, what),
            "fine-tune",
            ALL_RATES,
            alone,
            needs=("fine-tuned",),
            loss=unlabelled_loss,
        ),
        _variant(
            f"{first}, then all",
            partial(_then_all, first),
            "fine-tune",
            ALL_RATES,
            needs=("fine-tuned", first),
        ),
    )


# The ceiling is the central experiment's Copy: with a given map both kinds of attention are one.
LINEAR = study(
    "linear",
    _variant("scratch", partial(_student, Hedgehog), "scratch", UNTIL_LEARNED),
    _variant("elu, scratch", partial(_student, EluPlusOne), "scratch", UNTIL_LEARNED),
    _variant("distilled maps", partial(_distilled, Hedgehog, "map"), "distill", RATE_AND_WEIGHT),
    _variant("elu, distilled maps", partial(_distilled, EluPlusOne, "map"), "distill", RATE_AND_WEIGHT),
    _variant("distilled outputs", partial(_distilled, Hedgehog, "output"), "distill", _RATE_AND_FACTOR),
    _twin("routing"),
    _twin("message"),
    *_stages("map", "maps", 1.0),
    *_stages("output", "outputs", OUTPUTS),
    _variant(
        "fine-tuned, outputs, then low rank",
        partial(_then_low_rank, "fine-tuned, outputs"),
        "fine-tune",
        ALL_RATES,
        needs=("fine-tuned", "fine-tuned, outputs"),
    ),
    _variant("fine-tuned, all", partial(_then_all, None), "fine-tune", ALL_RATES, needs=("fine-tuned",)),
)
