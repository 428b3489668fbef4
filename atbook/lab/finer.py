"""The study of finer classes than the labels: trained on four, asked for eight."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from atbook.lab.scales import GlyphScale
from atbook.lab.study import Measure, Sources, Variant, by, fine_tune, scratch, study
from atbook.lab.tuning import Ladder
from atbook.worlds.coarse import TOGETHER, another_view, classes, coarse
from atbook.worlds.glyphs import SHAPES
from atfamily.grafit import Grafit, grafit_loss, numbered, snca_loss
from atfamily.measures.probes import features
from atfamily.measures.retrieval import conditional_scores, cosines, mean_average_precision, neighbour_votes
from atlib.attention_transfer import AttentionTransfer
from atlib.data import Images
from atlib.objectives import Loss, student_loss
from atlib.plan import Plan
from atlib.recipe import Recipe

NEIGHBOURS = 10


def _coarse(together: int, twin: str | None, scale: GlyphScale, seed: int) -> Images:
    return coarse(scale.labelled(seed, twin=twin), together)


def _numbered(together: int, scale: GlyphScale, seed: int) -> Images:
    return numbered(_coarse(together, None, scale, seed))


def loss_of_views(model: nn.Module, images: Tensor, labels: Tensor, recipe: Recipe) -> Tensor:
    """The loss of students, of other views of the images: a control for what views alone bring Grafit."""
    return student_loss(model, another_view(images), labels, recipe)


def _grafit(copies: bool, sources: Sources) -> Grafit:
    student = sources.student()
    trunk = AttentionTransfer(sources.teacher(), student, Plan()) if copies else student
    return Grafit(trunk, another_view, sources.scale.labels)


def finer(model: nn.Module, images: Images, together: int = TOGETHER) -> dict[str, float]:
    """How well a model's features tell the shapes apart, of which its labels knew groups: held-out images
    with fine labels, the first half of them known, the second half asked for.

    "map": mean average precision among the known. "map_conditional": the same on the condition of the coarse
    class that neighbours say; "map_oracle": of the true one. "knn" and "coarse_knn": accuracy of the vote of
    ten neighbours, of shapes and of coarse classes.
    """
    x = features(model.trunk if isinstance(model, Grafit) else model, images)
    half = len(x) // 2
    (gallery, queries), labels = (x[:half], x[half:]), images.targets
    of_gallery, of_queries = labels[:half], labels[half:]
    rough_gallery, rough_queries = of_gallery // together, of_queries // together
    similar, relevant = cosines(queries, gallery), of_queries[:, None] == of_gallery
    in_gallery = cosines(gallery, gallery).fill_diagonal_(-torch.inf)  # no image votes for itself
    votes = [neighbour_votes(table, rough_gallery, NEIGHBOURS) for table in (similar, in_gallery)]
    number = len(classes(together))
    true = [nn.functional.one_hot(rough, number).float() for rough in (rough_queries, rough_gallery)]
    knn = (neighbour_votes(similar, of_gallery, NEIGHBOURS).argmax(1) == of_queries).float().mean()
    coarse_knn = (votes[0].argmax(1) == rough_queries).float().mean()
    return {
        "map": mean_average_precision(similar, relevant),
        "map_conditional": mean_average_precision(conditional_scores(similar, *votes), relevant),
        "map_oracle": mean_average_precision(conditional_scores(similar, *true), relevant),
        "knn": knn.item(),
        "coarse_knn": coarse_knn.item(),
    }


_RATE = Ladder("lr", (1e-3, 2e-3, 4e-3))


def _variant(
    name: str,
    build: Callable[[Sources], nn.Module],
    like: str,
    loss: Loss = student_loss,
    changes: Mapping = {},
    twin: str | None = None,
    together: int = TOGETHER,
) -> Variant:
    by_number = loss in (grafit_loss, snca_loss)
    return Variant(
        name,
        build,
        like,
        changes,
        _RATE,
        {"num_classes": len(classes(together))},
        images=partial(_numbered, together) if by_number else partial(_coarse, together, twin),
        twin=twin,
        loss=loss,
        # rates are chosen by shapes of validation images, for all alike: what each can do at its best
        measure=Measure("map", partial(finer, together=together)),
    )


_BOTH = {"transfer_weight": 1.0}  # of the instance loss


def _with_classes(together: int) -> tuple[Variant, ...]:
    """Other granularities than four classes: from labels alone, and by Grafit. Of one class there is nothing
    to learn from labels."""
    labels = "one class" if together == len(SHAPES) else f"{len(classes(together))} classes"
    grafit = _variant(
        f"Grafit, {labels}", partial(_grafit, False), "scratch", grafit_loss, _BOTH, together=together
    )
    if together == len(SHAPES):
        return (grafit,)
    plain = _variant(f"scratch, {labels}", scratch, "scratch", together=together)
    return plain, grafit


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
    *_with_classes(1),
    *_with_classes(4),
    *_with_classes(8),
)
