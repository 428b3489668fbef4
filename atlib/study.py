"""Run a study: variants of the central experiment that change one thing at a time; every run leaves a record."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from atlib.checkpoint import Architecture, load_vit, load_weights, save_vit, save_weights
from atlib.data import Images
from atlib.experiment import Place, chosen, fine_tuned_weights, make_fine_tuned, make_teacher, run_each, scale_of, teach, write_run
from atlib.names import require_known
from atlib.record import read_record
from atlib.recipes import Recipe
from atlib.scales import TUNING_SEED, Scale
from atlib.schooling import Schooling

AGAIN = 1000  # between the seeds of first weights of repeated runs: no other seed is as large


class Sources(NamedTuple):
    """What a variant can be built from: the models of one seed of the central experiment, and a new student."""

    place: Place
    scale: Scale  # its `student` is the variant's
    seed: int
    again: int = 0  # another number: other first weights from the same teacher and labels

    @property
    def depth(self) -> int:
        """The central student's depth."""
        return len(scale_of(self.place).student.build().blocks)

    def teacher(self) -> VisionTransformer:
        """The pre-trained teacher of this seed."""
        return load_vit(self.place.work / f"teacher-seed{self.seed}.safetensors")

    def schooled(self, schooling: Schooling) -> VisionTransformer:
        """The teacher of this seed that was made in another way, one of the study's `teachers`."""
        return load_vit(_schooled_weights(self.place, schooling, self.seed))

    def another_teacher(self) -> VisionTransformer:
        """A teacher pre-trained from another seed, on other images."""
        return load_vit(self.place.work / f"teacher-seed{TUNING_SEED if self.seed != TUNING_SEED else 0}.safetensors")

    def fine_tuned(self) -> VisionTransformer:
        """The teacher of this seed, fine-tuned on the labels."""
        return load_vit(fine_tuned_weights(self.place, self.seed))

    def student(self) -> VisionTransformer:
        """A student fresh from its initialisation, which the seed decides."""
        torch.manual_seed(self.seed + AGAIN * self.again)
        return self.scale.student.build()

    def unlabelled(self) -> Images:
        """Images without labels, for what is estimated from the teacher."""
        return self.scale.unlabelled_images(self.seed)


@dataclass(frozen=True)
class Variant:
    """One way to teach a student.

    build: makes what `train` is given. like: the method of the central experiment whose chosen recipe it starts from; changes: to
    that recipe. trials: further changes to choose from on the validation split, with the tuning seed. student: changes to the
    student's constructor arguments. labels: training images, None for the scale's number. images: (scale, seed) -> the training images,
    where they are not the scale's own. needs: models it is built from beside the teacher of its seed, "fine-tuned" or "another teacher".
    stop_at: the step of its recipe's schedule at which it ends, as a checkpoint along the run; None for the whole.
    """

    name: str
    build: Callable[[Sources], nn.Module]
    like: str = "copy"
    changes: Mapping = field(default_factory=dict)
    trials: tuple[Mapping, ...] = ()
    student: Mapping = field(default_factory=dict)
    labels: int | None = None
    images: Callable[[Scale, int], Images] | None = None
    needs: tuple[str, ...] = ()
    stop_at: int | None = None


@dataclass(frozen=True)
class Study:
    """Variants that are compared with each other at one budget.

    shows: what they are to show. paper: where the paper (arXiv 2411.09702) has the like, with its figures. seeds: as recorded.
    minutes: of all runs at the built-in scale on two cores, the central teachers not counted. only: the one scale that it is made for, None for any.
    teachers: made for this study, beside the central ones. central: it is the central experiment itself, with that one's steps.
    """

    name: str
    shows: str
    paper: str
    variants: tuple[Variant, ...]
    seeds: int = 5
    minutes: int = 30
    only: str | None = None
    teachers: tuple[Schooling, ...] = ()
    central: bool = False

    def variant(self, name: str) -> Variant:
        """The variant of that name. Raises `ValueError` for an unknown one."""
        by_name = {variant.name: variant for variant in self.variants}
        require_known("method", name, by_name)
        return by_name[name]


class Run(NamedTuple):
    """One run of a study: a trial of the tuning (its index), or a reported run (None)."""

    study: Study
    transfer: Place
    records: Path
    variant: str
    seed: int
    trial: int | None = None

    @property
    def path(self) -> Path:
        name = self.variant.replace(" ", "-")
        return self.records / (f"{name}-seed{self.seed}.json" if self.trial is None else f"tuning/{name}-trial{self.trial}.json")

    @property
    def weights(self) -> Path:
        """Where a reported run keeps its student."""
        return self.transfer.work / self.study.name / self.path.with_suffix(".safetensors").name


def run_study(study: Study, transfer: Place, records: Path, seeds: int, methods: list[str] | None = None, jobs: int = 1) -> list[Path]:
    """Tune and run the study's variants (`methods`: only some) for seeds 0 to seeds - 1 and return the reported records' paths.

    Teachers, fine-tuned teachers and chosen recipes come from the central experiment, `transfer`; models that are missing are
    made. What already has a record is not run again. Where the scale has one recipe a method, trials are left out too. Raises `FileNotFoundError`
    when the central experiment has not been tuned, and `ValueError` for a scale that the study is not made for.
    """
    if study.only not in (None, transfer.scale):
        raise ValueError(f"{study.name} is made for the scale {study.only!r} (it uses what only that world has), not for {transfer.scale!r}")
    variants = [study.variant(name) for name in (methods or [variant.name for variant in study.variants])]
    tuning = scale_of(transfer).tuning
    for variant in variants:  # before hours are spent: the records to start from must be there
        if variant.like not in tuning:
            raise ValueError(f"{variant.name!r} starts from the recipe of {variant.like!r}, which the scale {transfer.scale!r} does not run; "
                             f"choose others with --methods, or the scale 'built-in'")
        chosen(transfer, variant.like)
    trials = [Run(study, transfer, records, v.name, TUNING_SEED, t) for v in variants for t in range(len(_trials(v, scale_of(transfer))))]
    make_models(study, variants, transfer, records, [*range(seeds), *([TUNING_SEED] if trials else [])], jobs)
    run_each(_run, [(run,) for run in trials], jobs, fresh=False)
    runs = [Run(study, transfer, records, variant.name, seed) for variant in variants for seed in range(seeds)]
    run_each(_run, [(run,) for run in runs], jobs, fresh=False)
    return [run.path for run in runs]


def make_models(study: Study, variants: list[Variant], transfer: Place, records: Path, seeds: list[int], jobs: int) -> None:
    """Make the teachers that the variants are built from, for these seeds, where they are missing."""
    others = [TUNING_SEED] if any("another teacher" in variant.needs for variant in variants) and TUNING_SEED not in seeds else []
    run_each(make_teacher, [(transfer, seed) for seed in [*seeds, *others]], jobs)
    if any("fine-tuned" in variant.needs for variant in variants):
        chosen(transfer, "fine-tune")
        run_each(make_fine_tuned, [(transfer, seed) for seed in seeds], jobs)
    schooled = [(study, transfer, records, schooling, seed) for schooling in study.teachers for seed in seeds if seed != TUNING_SEED]
    run_each(make_schooled, schooled, jobs)


def _trials(variant: Variant, scale: Scale) -> tuple[Mapping, ...]:
    """What to choose from: nothing at a scale that has one recipe for each method."""
    return variant.trials if len(scale.tuning[variant.like]) > 1 else ()


def _recipe(run: Run, scale: Scale) -> Recipe:
    variant = run.study.variant(run.variant)
    recipe = scale.recipe(scale.tuning[variant.like][chosen(run.transfer, variant.like)])
    share = 1.0 if run.study.central else scale.study_share
    recipe = replace(recipe, **({"steps": max(1, round(share * recipe.steps))} | variant.changes))
    trials = _trials(variant, scale)
    if not trials:
        return recipe
    trial = run.trial
    if trial is None:
        scores = [read_record(run._replace(seed=TUNING_SEED, trial=t).path).results["validation_accuracy"] for t in range(len(trials))]
        trial = max(range(len(scores)), key=lambda t: scores[t])
    return replace(recipe, **trials[trial])


def make_schooled(study: Study, transfer: Place, records: Path, schooling: Schooling, seed: int) -> None:
    """Make one of the study's teachers, keep its weights and write its record, unless both are there."""
    path, weights = records / "teachers" / f"{schooling.name}-seed{seed}.json", _schooled_weights(transfer, schooling, seed)
    if path.exists() and weights.exists():
        return
    scale, start = scale_of(transfer), time.perf_counter()
    teacher, architecture, history = schooling.make(scale.pretraining, scale.unlabelled, seed, f"{schooling.name} teacher, seed {seed}")
    seconds = time.perf_counter() - start
    save_vit(weights, teacher.cpu(), architecture)
    recipe = replace(scale.pretraining, **schooling.changes).describe()
    write_run(study.name, scale, f"teacher {schooling.name}", seed, recipe, {"pretraining_loss": history[-1]["loss"]}, history, seconds, path)


def trained(run: Run) -> nn.Module:
    """The trained model of a reported run, on the CPU: from its kept weights, or trained now, which writes its record too where it is missing."""
    variant, central = run.study.variant(run.variant), scale_of(run.transfer)
    scale = replace(central, labels=variant.labels or central.labels,
                    student=Architecture(central.student.name, {**central.student.overrides, **variant.student}))
    model = variant.build(Sources(run.transfer, scale, run.seed))
    student = getattr(model, "student", model)
    if run.trial is None and run.path.exists() and run.weights.exists():
        load_weights(run.weights, student)
        return model
    recipe = _recipe(run, scale)
    images = scale.labelled(run.seed) if variant.images is None else variant.images(scale, run.seed)
    split = "test" if run.trial is None else "validation"
    results, history, seconds = teach(model, scale, recipe, run.seed, split, f"{variant.name}, seed {run.seed}", images, variant.stop_at)
    if run.trial is None:
        save_weights(run.weights, student)
    if not run.path.exists():
        described = recipe.describe() | ({"stop_at": variant.stop_at} if variant.stop_at else {}) | ({"plan": model.plan.describe()} if hasattr(model, "plan") else {})
        write_run(run.study.name, scale, variant.name, run.seed, described, results, history, seconds, run.path)
    return model


def _run(run: Run) -> None:
    if not run.path.exists():
        trained(run)


def _schooled_weights(place: Place, schooling: Schooling, seed: int) -> Path:
    return place.work / f"teacher-{schooling.name}-seed{seed}.safetensors"
