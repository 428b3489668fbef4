"""The study of finer classes than the labels: trained on four, asked for eight."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from atbook.lab.scales import GlyphScale
from atbook.lab.study import Measure, Sources, Variant, by, fine_tune, scratch, study
from atbook.lab.tuning import Ladder
from atbook.worlds.coarse import COARSE, TOGETHER, another_view, coarse
from atfamily.grafit import Grafit, grafit_loss, numbered, snca_loss
from atfamily.measures.probes import features
from atfamily.measures.retrieval import conditional_scores, cosines, mean_average_precision, neighbour_votes
from atlib.attention_transfer import AttentionTransfer
from atlib.data import Images
from atlib.objectives import Loss, student_loss
from atlib.plan import Plan
from atlib.recipe import Recipe

NEIGHBOURS = 10


def _coarse(scale: GlyphScale, seed: int, twin: str | None = None) -> Images:
    return coarse(scale.labelled(seed, twin=twin))


def _numbered(scale: GlyphScale, seed: int) -> Images:
    return numbered(_coarse(scale, seed))


def loss_of_views(model: nn.Module, images: Tensor, labels: Tensor, recipe: Recipe) -> Tensor:
    """The loss of students, of other views of the images: a control for what views alone bring Grafit."""
    return student_loss(model, another_view(images), labels, recipe)


def _grafit(copies: bool, sources: Sources) -> Grafit:
    student = sources.student()
    trunk = AttentionTransfer(sources.teacher(), student, Plan()) if copies else student
    return Grafit(trunk, another_view, sources.scale.labels)


def finer(model: nn.Module, images: Images) -> dict[str, float]:
    """How well a model's features tell the shapes apart, of which its labels knew pairs: held-out images with
    fine labels, the first half of them known, the second half asked for.

    "map": mean average precision among the known. "map_conditional": the same on the condition of the coarse
    class that neighbours say; "map_oracle": of the true one. "knn" and "coarse_knn": accuracy of the vote of
    ten neighbours, of shapes and of coarse classes.
    """
    x = features(model.trunk if isinstance(model, Grafit) else model, images)
    half = len(x) // 2
    (known, asked), labels = (x[:half], x[half:]), images.targets
    of_known, of_asked = labels[:half], labels[half:]
    rough_known, rough_asked = of_known // TOGETHER, of_asked // TOGETHER
    similar, relevant = cosines(asked, known), of_asked[:, None] == of_known
    among_known = cosines(known, known).fill_diagonal_(-torch.inf)  # no image votes for itself
    said = [neighbour_votes(table, rough_known, NEIGHBOURS) for table in (similar, among_known)]
    true = [nn.functional.one_hot(rough, len(COARSE)).float() for rough in (rough_asked, rough_known)]
    knn = (neighbour_votes(similar, of_known, NEIGHBOURS).argmax(1) == of_asked).float().mean()
    coarse_knn = (said[0].argmax(1) == rough_asked).float().mean()
    return {
        "map": mean_average_precision(similar, relevant),
        "map_conditional": mean_average_precision(conditional_scores(similar, *said), relevant),
        "map_oracle": mean_average_precision(conditional_scores(similar, *true), relevant),
        "knn": knn.item(),
        "coarse_knn": coarse_knn.item(),
    }


# Rates are chosen by shapes of validation images, for all in the same way: what each can do at its best.
FINER = Measure("map", finer)
_RATE = Ladder("lr", (1e-3, 2e-3, 4e-3))


def _variant(
    name: str,
    build: Callable[[Sources], nn.Module],
    like: str,
    loss: Loss = student_loss,
    changes: Mapping = {},
    twin: str | None = None,
) -> Variant:
    by_number = loss in (grafit_loss, snca_loss)
    return Variant(
        name,
        build,
        like,
        changes,
        _RATE,
        {"num_classes": len(COARSE)},
        images=_numbered if by_number else partial(_coarse, twin=twin),
        twin=twin,
        loss=loss,
        measure=FINER,
    )


_BOTH = {"transfer_weight": 1.0}  # of the instance loss

FINER_STUDY = study(
    "finer",
    _variant("scratch", scratch, "scratch"),
    _variant("scratch, views", scratch, "scratch", loss_of_views),
    _variant("copy", by(), "copy"),
    _variant("copy, views", by(), "copy", loss_of_views),
    _variant("copy, routing twin", by(), "copy-routing-twin", twin="routing"),
    _variant("fine-tune", fine_tune, "fine-tune"),
    _variant("SNCA+", partial(_grafit, False), "scratch", snca_loss),
    _variant("Grafit", partial(_grafit, False), "scratch", grafit_loss, _BOTH),
    _variant("Grafit, copy", partial(_grafit, True), "copy", grafit_loss, _BOTH),
)
