"""Examine the trained models of a study: what is measured on them after training, alone or against each
other, leaves records too."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from timm.models.deit import VisionTransformerDistilled
from torch import Tensor, nn

from atbook.lab.scales import TUNING_SEED
from atbook.lab.studies import (
    CENTRAL,
    DEPTH,
    DISTILLED_MAE,
    DISTILLED_TOO,
    FAMILY,
    LONG_TAIL,
    PAINTERS,
    PAIRS,
    POOL,
    TOKEN,
)
from atbook.lab.study import (
    Place,
    Run,
    Sources,
    Study,
    check_tuned,
    described,
    make_models,
    make_run,
    make_teacher,
    require_made_for,
    run_each,
    scale_of,
    trained,
    write_run,
)
from atbook.records import read_file, read_records
from atbook.worlds import glyph_images, glyphs
from atbook.worlds.shifts import all_shifts
from atfamily.depth import branch_ratios
from atfamily.distillation_token import token_report
from atfamily.measures.cka import class_token, layer_cka
from atfamily.measures.fourier import layer_profiles
from atfamily.measures.predictions import disagreement, ensemble_accuracy, expected_calibration_error
from atfamily.measures.probes import features, knn_accuracy, linear_probe, mlp_probe
from atfamily.measures.subsets import (
    adversarially_filtered,
    class_counts,
    class_groups,
    evaluate_filtered,
    group_accuracy,
)
from atlib._util import require_known
from atlib.analysis import PAIRINGS, compare_layers, describe_layers, walks
from atlib.data import Images
from atlib.evaluate import evaluate, predict
from atlib.pair import Pair
from atrun.record import Record


@dataclass(frozen=True)
class Examination:
    """A measurement on trained models, one seed at a time."""

    name: str
    # ({method: trained model}, the seed's sources) -> {name of a record: its results}.
    measure: Callable[[Mapping[str, nn.Module], Sources], Mapping[str, Mapping]]
    # That the models are of, and which of their variants.
    studies: tuple[Study, ...]
    methods: tuple[str, ...]
    # Every model is measured by itself, so that one can be added later.
    alone: bool = False
    # As in `Study`.
    shows: str = ""
    paper: str = ""
    seeds: int = 5
    only: tuple[str, ...] = ()

    def study_of(self, method: str) -> Study:
        """The study that has a method. Raises `ValueError` for an unknown one."""
        of = {variant.name: study for study in self.studies for variant in study.variants}
        require_known("method", method, of)
        return of[method]


def run_examination(
    examination: Examination, place: Place, seeds: int, methods: list[str] | None = None, jobs: int = 1
) -> list[Record]:
    """Measure the models of seeds 0 to seeds - 1 (`methods`: only some) and return all of its records.

    Models whose weights are not kept are trained first. What has a record is not measured again: a model that
    is measured alone, else a seed. Raises `ValueError` for a scale that it is not made for, for an unknown
    method, and where records of a comparison with more models would be replaced.
    """
    methods = tuple(dict.fromkeys(methods or examination.methods))
    require_made_for(examination, place)
    studies = {method: examination.study_of(method) for method in methods}
    record_keys = {(r.method, r.seed) for r in read_file(place.records(examination.name))}
    missing = {seed: [m for m in methods if (m, seed) not in record_keys] for seed in range(seeds)}
    missing = {seed: some if examination.alone else [*methods] for seed, some in missing.items() if some}
    lost = sorted({m for seed, some in missing.items() for m in some if (m, seed) in record_keys})
    if lost and {*methods} != {*examination.methods}:
        raise ValueError(
            f"{examination.name} compares its models with each other, so its records of {', '.join(lost)}"
            f" would be replaced by a comparison with {', '.join(methods)} alone: leave --methods out"
        )
    if scale_of(place).makes_teachers:  # which may be compared with its students
        run_each(make_teacher, [(place, seed) for seed in missing], jobs)
    for study in examination.studies:
        needed = {m for some in missing.values() for m in some if studies[m] is study}
        variants = [variant for variant in study.variants if variant.name in needed]
        check_tuned(variants, place)
        make_models(study, variants, place, [*missing], jobs)
    runs = [(Run(studies[method], place, method, seed),) for seed, some in missing.items() for method in some]
    run_each(make_run, runs, jobs)
    run_each(_measure, [(examination, place, tuple(some), seed) for seed, some in missing.items()], jobs)
    return read_records(examination.name, place.scale, results=place.results)


def model_of(study: Study, place: Place, method: str, seed: int) -> nn.Module:
    """A trained model of a study, from kept weights or trained now."""
    return trained(Run(study, place, method, seed)).eval()


def _measure(examination: Examination, place: Place, methods: tuple[str, ...], seed: int) -> None:
    scale, start = scale_of(place), time.perf_counter()
    models = {method: model_of(examination.study_of(method), place, method, seed) for method in methods}
    measured = examination.measure(models, Sources(place, scale, seed))
    seconds = time.perf_counter() - start
    for name, results in measured.items():
        write_run(examination.name, place, scale, ("run", name, seed, None), {}, dict(results), [], seconds)


# --- What is measured on trained models: accuracy under every shift, likeness to the teacher and to each
# other, imbalanced classes ---

COMPARED = (
    "scratch",
    "fine-tune",
    "copy",
    "distill",
    "copy-untrained",
    "features",
    "copy-q",
    "copy-k",
    "copy-v",
    "copy-fine-tuned",
    "copy into another teacher's weights",
    "soft predictions",
)
TWICE = ("scratch-2", "fine-tune again", "copy again", "distill again")
# The model whose mistakes make the adversarially filtered set: of the tuning seed, so that it is in no
# comparison and shares no labels with one.
FILTER = "narrow"
PROBED = {"train": 8000, "test": 2000}  # images whose maps are read
LOOKED_AT = 1000  # test images on which models are compared from inside
BRANCHES_OF = 200  # test images of which every branch of 24 layers is held at once


def bare(model: nn.Module) -> nn.Module:
    """What is run on an image after training: the student alone where the method says that no teacher is
    needed, otherwise the whole model."""
    return model.student if isinstance(model, Pair) and not model.needs_teacher else model


def under_shifts(models: Mapping[str, nn.Module], sources: Sources) -> dict[str, dict]:
    """Accuracy of every model on test images under every shift and severity, and on those that a fixed other
    model gets wrong ("filtered")."""
    sets = all_shifts()
    filtered = adversarially_filtered(
        sources.scale.held_out("test"), model_of(POOL, sources.place, FILTER, TUNING_SEED)
    )
    return {
        name: (
            {shift: evaluate(bare(model), images).accuracy for shift, images in sets.items()}
            | {
                "test_accuracy": evaluate(bare(model), sources.scale.held_out("test")).accuracy,
                "filtered": evaluate_filtered(bare(model), filtered).accuracy,
            }
        )
        for name, model in models.items()
    }


def compared(models: Mapping[str, nn.Module], sources: Sources) -> dict[str, dict]:
    """Of every model: how its predictions, features and maps relate to those of the others, of the teacher
    and of the fine-tuned teacher."""
    scale, teacher = sources.scale, sources.teacher().eval()
    test = scale.held_out("test")
    looked_at = test.select(range(min(LOOKED_AT, len(test))))
    ready = {name: bare(model) for name, model in models.items()}
    p = {name: predict(model, test).softmax(-1) for name, model in ready.items()}
    return {
        name: (
            _likeness(model, teacher, ready["fine-tune"], looked_at)
            | _predictions(name, p, test.targets)
            | _probes(model, scale, sources.seed, test)
        )
        for name, model in ready.items()
    } | {
        "teacher": (
            _likeness(teacher, teacher, ready["fine-tune"], looked_at)
            | _probes(teacher, scale, sources.seed, test)
        )
    }


def _likeness(model: nn.Module, teacher: nn.Module, fine_tuned: nn.Module, images: Images) -> dict:
    """CKA of every layer with every layer of the teacher and of the fine-tuned model; divergence of maps;
    what the maps are like."""
    statistics = describe_layers(model, images)
    divergences = compare_layers(model, teacher, images)
    return {
        "cka to teacher": layer_cka(model, teacher, images, class_token).tolist(),
        "cka to fine-tune": layer_cka(model, fine_tuned, images, class_token).tolist(),
        "divergence from teacher": {
            pairing: [layer.value(pairing) for layer in divergences] for pairing in PAIRINGS
        },
        "distance": [layer.distance.tolist() for layer in statistics],
        "entropy": [layer.entropy.tolist() for layer in statistics],
        "fourier": [profile.log_amplitude.tolist() for profile in layer_profiles(model, images)],
    }


def _predictions(name: str, p: Mapping[str, Tensor], labels: Tensor) -> dict:
    others = [other for other in p if other != name]
    return {
        "test_accuracy": (p[name].argmax(1) == labels).double().mean().item(),
        "calibration error": expected_calibration_error(p[name], labels),
        "disagreement": {other: disagreement(p[name], p[other]) for other in others},
        "ensemble": {other: ensemble_accuracy(p[name], p[other], labels) for other in others},
    }


def _probes(model: nn.Module, scale, seed: int, test: Images) -> dict:
    """What a nearest-neighbour vote and a linear layer make of the features, from the labels that the
    students had."""
    train, validation = scale.labelled(seed), scale.held_out("validation")
    x = [features(model, images) for images in (train, validation, test)]
    y = [images.targets for images in (train, validation, test)]
    probe = linear_probe(x[0], y[0], x[1], y[1], x[2], y[2], steps=300)
    return {
        "k-nn": {str(k): accuracy for k, accuracy in knn_accuracy(x[0], y[0], x[2], y[2]).items()},
        "linear probe": probe.test_accuracy,
    }


def named_from_maps(models: Mapping[str, nn.Module], sources: Sources) -> dict[str, dict]:
    """What a small network names from the teacher's maps of an image, and of each of its twins: the shape of
    the image's glyph, and the cell it is in. {"itself" or a twin: {"shape" or "cell": test accuracy}}."""
    teacher, world = sources.teacher().eval(), sources.scale.world
    named_from = {}
    for twin in (None, *glyphs.TWINS):
        maps, named = {}, {}
        for split, size in PROBED.items():
            seen, scenes = (glyphs.generate(split, size, sources.seed, world, of) for of in (twin, None))
            maps[split] = _maps_of(teacher, glyph_images(seen))
            named[split] = {"shape": torch.from_numpy(scenes.shape), "cell": torch.from_numpy(scenes.cell)}
        named_from[twin or "itself"] = {
            what: mlp_probe(maps["train"], named["train"][what], maps["test"], named["test"][what])
            for what in ("shape", "cell")
        }
    return {method: named_from for method in models}


def _maps_of(vit: nn.Module, images: Images) -> Tensor:
    """All maps of all layers and heads, flattened: (n, L · H · N · N)."""
    return torch.cat(
        [
            torch.stack([layer.map for layer in seen.layers], 1).flatten(1)
            for (seen,) in walks([vit], images, 500)
        ]
    )


def likened_to_the_teacher(models: Mapping[str, nn.Module], sources: Sources) -> dict[str, dict]:
    """Of students that painted before there were labels: the CKA of every layer with every layer of the
    teacher, on test images, before and after they were fine-tuned."""
    teacher, test = sources.teacher().eval(), sources.scale.held_out("test")
    images = test.select(range(min(LOOKED_AT, len(test))))

    def cka(model: nn.Module) -> list[list[float]]:
        return layer_cka(model, teacher, images, class_token).tolist()

    return {
        name: {
            "cka before labels": cka(sources._replace(schooling=PAINTERS[name]).teacher().eval()),
            "cka after labels": cka(bare(model)),
        }
        for name, model in models.items()
    }


def probed(models: Mapping[str, nn.Module], sources: Sources) -> dict[str, dict]:
    """What a vote of nearest neighbours and a linear probe make of the features of every model, and of the
    teacher."""
    test = sources.scale.held_out("test")
    ready = {name: bare(model) for name, model in models.items()} | {"teacher": sources.teacher().eval()}
    return {name: _probes(model, sources.scale, sources.seed, test) for name, model in ready.items()}


def compared_with_their_teachers(models: Mapping[str, nn.Module], sources: Sources) -> dict[str, dict]:
    """How often the answers of every model, the fine-tuned ViT ("ViT") among them, differ from those of every
    other; and of students with two tokens, the cosine of these after every layer and the final norm."""
    test = sources.scale.held_out("test")
    looked_at, _ = test.take(range(min(LOOKED_AT, len(test))))
    ready = {name: bare(model) for name, model in models.items()} | {"ViT": sources.fine_tuned().eval()}
    p = {name: predict(model, test).softmax(-1) for name, model in ready.items()}
    return {
        name: (
            _predictions(name, p, test.targets)
            | (
                {"cosine": token_report(model, ready["ViT"], looked_at).cosine.tolist()}
                if isinstance(model, VisionTransformerDistilled)
                else {}
            )
        )
        for name, model in ready.items()
    }


def loudness_of_branches(models: Mapping[str, nn.Module], sources: Sources) -> dict[str, dict]:
    """How loud the attention branch and the MLP of every layer are beside the residual stream, on test
    images; of a pair, with the maps that its student is given."""
    test = sources.scale.held_out("test")
    images, _ = test.take(range(min(BRANCHES_OF, len(test))))
    return {
        name: {branch: of.tolist() for branch, of in branch_ratios(model, images)._asdict().items()}
        for name, model in models.items()
    }


def by_class_groups(models: Mapping[str, nn.Module], sources: Sources) -> dict[str, dict]:
    """Accuracy for classes with many, a medium number of and few training images."""
    train = LONG_TAIL.variants[0].images(sources.scale, sources.seed)
    groups, test = class_groups(class_counts(train)), sources.scale.held_out("test")
    accuracies = {}
    for name, model in models.items():
        logits = predict(bare(model), test)
        accuracies[name] = group_accuracy(logits, test.targets, groups) | {
            "test_accuracy": (logits.argmax(1) == test.targets).double().mean().item()
        }
    return accuracies


def _examination(name: str, measure: Callable, *studies: Study, methods: tuple[str, ...], alone: bool = True):
    return Examination(name, measure, studies, methods, alone, **described(name))


def _names(study: Study) -> tuple[str, ...]:
    return tuple(variant.name for variant in study.variants)


EXAMINATIONS = {
    examination.name: examination
    for examination in (
        _examination(
            "shifts", under_shifts, CENTRAL, FAMILY, methods=(*COMPARED, "distill-long"), alone=True
        ),
        _examination(
            "shifts-pool", under_shifts, POOL, methods=tuple(name for name in _names(POOL) if name != FILTER)
        ),
        _examination("twins", named_from_maps, CENTRAL, methods=("copy",)),
        _examination("comparison", compared, CENTRAL, FAMILY, methods=COMPARED + TWICE, alone=False),
        _examination("class-groups", by_class_groups, LONG_TAIL, methods=_names(LONG_TAIL)),
        _examination(
            "painters-layers",
            likened_to_the_teacher,
            DISTILLED_MAE,
            methods=(
                "MAE",
                "logits, last layer",
                "maps, all layers, head by head",
                "hidden states, last layer",
            ),
        ),
        _examination(
            "pairs-probed",
            probed,
            PAIRS,
            DISTILLED_TOO,
            methods=(
                "two heads, scratch",
                "two heads, attndistill",
                "two heads, attndistill projector of 1",
                "two heads, attndistill class token alone",
            ),
            alone=False,
        ),
        _examination(
            "token-compared", compared_with_their_teachers, TOKEN, methods=_names(TOKEN), alone=False
        ),
        _examination(
            "depth-branches",
            loudness_of_branches,
            DEPTH,
            methods=(
                "24 layers",
                "24 layers, layer scale",
                "24 layers, copy",
                "24 layers, layer scale, copy",
            ),
        ),
    )
}
