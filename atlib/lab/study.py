"""Run a study: variants of the central experiment that change one thing at a time; every run leaves a record."""

import copy
import multiprocessing
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from atlib._util import require_known
from atlib.checkpoint import load_vit, load_weights, save_vit, save_weights
from atlib.data.images import Images
from atlib.lab.scales import TUNING_SEED, Scale, Schooling, scales
from atlib.plan import Plan
from atlib.record import Record, about, peak_memory_mb, read_record, write_record
from atlib.train.evaluate import evaluate
from atlib.train.loop import train
from atlib.train.recipe import Recipe
from atlib.transfer import AttentionTransfer, student_of
from atlib.vit import Architecture

# --- The central experiment: the same student taught in six ways, tuned alike, over several seeds; every run
# leaves a record ---


class Job(NamedTuple):
    """One run: a trial of the tuning (`trial` is its index in the method's grid) or a reported run (`trial`
    is None)."""

    method: str
    seed: int
    trial: int | None

    @property
    def name(self) -> str:
        return (
            f"{self.method}-seed{self.seed}"
            if self.trial is None
            else f"tuning/{self.method}-trial{self.trial}"
        )


class Place(NamedTuple):
    """Where an experiment reads and writes. records: kept and committed; work: teachers and other weights,
    thrown away."""

    scale: str
    data: Path | None
    records: Path
    work: Path


def build_student(
    method: str,
    teacher: VisionTransformer,
    fine_tuned: VisionTransformer | None,
    architecture: Architecture,
    seed: int,
) -> nn.Module:
    """The untrained student of a method: what `train` is given.

    scratch: a new ViT. fine-tune: the teacher's weights, a new head. copy, distill: a new ViT with the
    teacher's maps. copy-q: a new ViT with the teacher's queries. copy-untrained: maps of a teacher that is
    only initialised. copy-fine-tuned: maps of the fine-tuned teacher.
    """
    torch.manual_seed(seed)
    student = architecture.build()
    match method:
        case "scratch":
            return student
        case "fine-tune":
            student = copy.deepcopy(teacher)
            student.reset_classifier(architecture.build().num_classes)
            return student.requires_grad_(True)
        case "copy":
            return AttentionTransfer(copy.deepcopy(teacher), student, Plan(how="copy"))
        case "copy-q":
            return AttentionTransfer(copy.deepcopy(teacher), student, Plan(what="q", how="copy"))
        case "copy-untrained":
            return AttentionTransfer(architecture.build(), student, Plan(how="copy"))
        case "copy-fine-tuned":
            if fine_tuned is None:
                raise ValueError(
                    "copy-fine-tuned needs the fine-tuned teacher: run the method 'fine-tune' first"
                )
            return AttentionTransfer(copy.deepcopy(fine_tuned), student, Plan(how="copy"))
        case "distill":
            return AttentionTransfer(copy.deepcopy(teacher), student, Plan(how="distill"))
    raise ValueError(f"unknown method {method!r}")


def run_experiment(place: Place, seeds: int, methods: list[str], jobs: int = 1) -> list[Path]:
    """Tune and run `methods` for seeds 0 to seeds - 1 and return the paths of the reported records.

    What already has a record is not run again, so an interrupted experiment goes on where it stopped. `jobs`
    runs go side by side, one thread each. fine-tune goes first where copy-fine-tuned needs its weights.
    """
    scale = scale_of(place)
    if seeds > TUNING_SEED:
        raise ValueError(
            f"at most {TUNING_SEED} seeds: seed {TUNING_SEED} is the one that recipes are tuned on, got"
            f" {seeds}"
        )
    for method in methods:
        require_known("method", method, scale.methods)
    tuned = any(len(scale.tuning[m]) > 1 for m in methods)
    all_seeds = [*range(seeds), *([TUNING_SEED] if tuned else [])]
    run_each(make_teacher, [(place, seed) for seed in all_seeds], jobs)
    first = [m for m in ("fine-tune",) if m in methods or "copy-fine-tuned" in methods]
    reported = []
    for group in (first, [m for m in methods if m not in first]):
        trials = [
            Job(m, TUNING_SEED, t)
            for m in group
            for t in range(len(scale.tuning[m]))
            if len(scale.tuning[m]) > 1
        ]
        run_each(_student_job, [(place, job) for job in trials], jobs)
        runs = [Job(m, seed, None) for m in group for seed in range(seeds)]
        run_each(_student_job, [(place, job) for job in runs], jobs)
        reported += [place.records / f"{job.name}.json" for job in runs]
    return reported


def chosen(place: Place, method: str) -> int:
    """The index of the method's recipe with the best validation accuracy; ties go to the first.

    Raises `FileNotFoundError` while a trial of the method has no record.
    """
    trials = len(scale_of(place).tuning[method])
    if trials == 1:
        return 0
    paths = [place.records / f"{Job(method, TUNING_SEED, t).name}.json" for t in range(trials)]
    missing = [path for path in paths if not path.exists()]
    if missing:
        raise FileNotFoundError(
            f"{method} is not tuned yet, {missing[0]} does not exist: "
            f"run `python -m atlib experiment transfer --scale {place.scale}` first"
        )
    scores = [read_record(path).results["validation_accuracy"] for path in paths]
    return max(range(trials), key=lambda t: scores[t])


def scale_of(place: Place) -> Scale:
    """The scale that a place names. Raises `ValueError` for an unknown one."""
    known = scales(place.data)
    require_known("scale", place.scale, known)
    return known[place.scale]


def make_teacher(place: Place, seed: int) -> None:
    """Pre-train the teacher of a seed, keep its weights and write its record, unless both are there."""
    record_path, weights = (
        place.records / f"teacher-seed{seed}.json",
        place.work / f"teacher-seed{seed}.safetensors",
    )
    if record_path.exists() and weights.exists():
        return
    scale, start = scale_of(place), time.perf_counter()
    teacher, architecture, history = scale.make_teacher(seed, progress=f"teacher, seed {seed}")
    seconds = time.perf_counter() - start
    save_vit(weights, teacher.cpu(), architecture)
    write_run(
        "transfer",
        scale,
        "teacher",
        seed,
        scale.pretraining.describe(),
        {"pretraining_loss": history[-1]["loss"]},
        history,
        seconds,
        record_path,
    )


def _student_job(place: Place, job: Job) -> None:
    path = place.records / f"{job.name}.json"
    is_teacher = job.method == "fine-tune"  # of copy-fine-tuned
    weights = place.work / f"{job.name.replace('/', '-')}.safetensors"
    if path.exists() and (weights.exists() or not is_teacher):
        return
    scale = scale_of(place)
    teacher = load_vit(place.work / f"teacher-seed{job.seed}.safetensors")
    fine_tuned = load_vit(fine_tuned_weights(place, job.seed)) if job.method == "copy-fine-tuned" else None
    student = build_student(job.method, teacher, fine_tuned, scale.student, job.seed)
    recipe = scale.recipe(
        scale.tuning[job.method][chosen(place, job.method) if job.trial is None else job.trial]
    )

    split = (
        "test" if job.trial is None else "validation"
    )  # tuning never sees a test image, and a reported run no other
    results, history, seconds = teach(student, scale, recipe, job.seed, split, job.name)
    if is_teacher:
        vit = scale.student.build()
        vit.load_state_dict(student.state_dict())
        save_vit(weights, vit, scale.student)
    if job.trial is None:  # for examinations of the trained models
        save_weights(student_weights(place, job), student_of(student))
    write_run("transfer", scale, job.method, job.seed, recipe.describe(), results, history, seconds, path)


def teach(
    student: nn.Module,
    scale: Scale,
    recipe: Recipe,
    seed: int,
    split: str,
    name: str,
    images: Images | None = None,
    stop_at: int | None = None,
) -> tuple[dict, list[dict], float]:
    """Train a student in place on its seed's labels (or on `images`) and evaluate it on `split`: results,
    history, seconds of both.

    stop_at: end after that many steps of the recipe, as a checkpoint along the run would be.
    """
    sets = {split: scale.held_out(split)} | {
        f"{split}_{name}": images for name, images in scale.elsewhere(split).items()
    }

    def metrics(model: nn.Module) -> dict:
        found = {name: evaluate(model, images) for name, images in sets.items()}
        return {f"{name}_accuracy": each.accuracy for name, each in found.items()} | {
            f"{name}_loss": each.loss for name, each in found.items()
        }

    start = time.perf_counter()
    history = train(
        student,
        scale.labelled(seed) if images is None else images,
        recipe,
        seed=seed,
        evaluate=metrics,
        progress=name,
        stop_at=stop_at,
    )
    seconds = time.perf_counter() - start
    return {name: value for name, value in history[-1].items() if name.startswith(split)}, history, seconds


def make_fine_tuned(place: Place, seed: int) -> None:
    """Fine-tune the teacher of a seed with the chosen recipe and keep its weights, unless they are there."""
    _student_job(place, Job("fine-tune", seed, None if seed != TUNING_SEED else chosen(place, "fine-tune")))


def fine_tuned_weights(place: Place, seed: int) -> Path:
    """Where the fine-tuned teacher of a seed is kept; for the tuning seed, that of the chosen trial."""
    job = Job("fine-tune", seed, None if seed != TUNING_SEED else chosen(place, "fine-tune"))
    return place.work / f"{job.name.replace('/', '-')}.safetensors"


def student_weights(place: Place, job: Job) -> Path:
    """Where a reported run keeps its student."""
    return place.work / "transfer" / f"{job.name}.safetensors"


def write_run(
    experiment: str,
    scale: Scale,
    method: str,
    seed: int,
    recipe: dict,
    results: dict,
    history: list,
    seconds: float,
    path: Path,
) -> None:
    """Write the record of a finished run, with the memory of this process and what it ran on."""
    config = {
        "scale": scale.name,
        "student": scale.student._asdict(),
        "labels": scale.labels,
        "unlabelled": scale.unlabelled,
        "recipe": recipe,
    }
    device = "cuda" if torch.cuda.is_available() else "cpu"
    write_record(
        path,
        Record(
            experiment,
            method,
            seed,
            config,
            results,
            history,
            round(seconds, 2),
            round(peak_memory_mb(), 1),
            about(device),
        ),
    )


def run_each(function, arguments: list[tuple], jobs: int, fresh: bool = True) -> None:
    """Call `function` with each tuple of arguments, `jobs` at a time; the first failure ends it all.

    `fresh`: every call in a process of its own, so that its peak memory is its own and nothing carries over;
    short runs that would spend a seventh of their time on imports do without, and their peak memory is that
    of a process that has run others.
    """
    if jobs == 1:
        for each in arguments:
            function(*each)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        jobs,
        mp_context=context,
        initializer=torch.set_num_threads,
        initargs=(1,),
        max_tasks_per_child=1 if fresh else None,
    ) as pool:
        for waiting in [pool.submit(function, *each) for each in arguments]:
            waiting.result()


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
        return load_vit(
            self.place.work / f"teacher-seed{TUNING_SEED if self.seed != TUNING_SEED else 0}.safetensors"
        )

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

    build: makes what `train` is given. like: the method of the central experiment whose chosen recipe it
    starts from; changes: to that recipe. trials: further changes to choose from on the validation split, with
    the tuning seed. student: changes to the student's constructor arguments. labels: training images, None
    for the scale's number. images: (scale, seed) -> the training images, where they are not the scale's own.
    needs: models it is built from beside the teacher of its seed, "fine-tuned" or "another teacher". stop_at:
    the step of its recipe's schedule at which it ends, as a checkpoint along the run; None for the whole.
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

    shows: what they are to show. paper: where the paper (arXiv 2411.09702) has the like, with its figures.
    seeds: as recorded. minutes: of all runs at the built-in scale on two cores, the central teachers not
    counted. only: the one scale that it is made for, None for any. teachers: made for this study, beside the
    central ones. central: it is the central experiment itself, with that one's steps.
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
        return self.records / (
            f"{name}-seed{self.seed}.json" if self.trial is None else f"tuning/{name}-trial{self.trial}.json"
        )

    @property
    def weights(self) -> Path:
        """Where a reported run keeps its student."""
        return self.transfer.work / self.study.name / self.path.with_suffix(".safetensors").name


def run_study(
    study: Study, transfer: Place, records: Path, seeds: int, methods: list[str] | None = None, jobs: int = 1
) -> list[Path]:
    """Tune and run the study's variants (`methods`: only some) for seeds 0 to seeds - 1 and return the
    reported records' paths.

    Teachers, fine-tuned teachers and chosen recipes come from the central experiment, `transfer`; models that
    are missing are made. What already has a record is not run again. Where the scale has one recipe a method,
    trials are left out too. Raises `FileNotFoundError` when the central experiment has not been tuned, and
    `ValueError` for a scale that the study is not made for.
    """
    if study.only not in (None, transfer.scale):
        raise ValueError(
            f"{study.name} is made for the scale {study.only!r} (it uses what only that world has), not for"
            f" {transfer.scale!r}"
        )
    variants = [study.variant(name) for name in methods or [variant.name for variant in study.variants]]
    tuning = scale_of(transfer).tuning
    for variant in variants:  # before hours are spent: the records to start from must be there
        if variant.like not in tuning:
            raise ValueError(
                f"{variant.name!r} starts from the recipe of {variant.like!r}, which the scale"
                f" {transfer.scale!r} does not run; choose others with --methods, or the scale 'built-in'"
            )
        chosen(transfer, variant.like)
    trials = [
        Run(study, transfer, records, v.name, TUNING_SEED, t)
        for v in variants
        for t in range(len(_trials(v, scale_of(transfer))))
    ]
    make_models(study, variants, transfer, records, [*range(seeds), *([TUNING_SEED] if trials else [])], jobs)
    run_each(_run, [(run,) for run in trials], jobs, fresh=False)
    runs = [
        Run(study, transfer, records, variant.name, seed) for variant in variants for seed in range(seeds)
    ]
    run_each(_run, [(run,) for run in runs], jobs, fresh=False)
    return [run.path for run in runs]


def make_models(
    study: Study, variants: list[Variant], transfer: Place, records: Path, seeds: list[int], jobs: int
) -> None:
    """Make the teachers that the variants are built from, for these seeds, where they are missing."""
    others = (
        [TUNING_SEED]
        if any("another teacher" in variant.needs for variant in variants) and TUNING_SEED not in seeds
        else []
    )
    run_each(make_teacher, [(transfer, seed) for seed in [*seeds, *others]], jobs)
    if any("fine-tuned" in variant.needs for variant in variants):
        chosen(transfer, "fine-tune")
        run_each(make_fine_tuned, [(transfer, seed) for seed in seeds], jobs)
    schooled = [
        (study, transfer, records, schooling, seed)
        for schooling in study.teachers
        for seed in seeds
        if seed != TUNING_SEED
    ]
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
        scores = [
            read_record(run._replace(seed=TUNING_SEED, trial=t).path).results["validation_accuracy"]
            for t in range(len(trials))
        ]
        trial = max(range(len(scores)), key=lambda t: scores[t])
    return replace(recipe, **trials[trial])


def make_schooled(study: Study, transfer: Place, records: Path, schooling: Schooling, seed: int) -> None:
    """Make one of the study's teachers, keep its weights and write its record, unless both are there."""
    path, weights = (
        records / "teachers" / f"{schooling.name}-seed{seed}.json",
        _schooled_weights(transfer, schooling, seed),
    )
    if path.exists() and weights.exists():
        return
    scale, start = scale_of(transfer), time.perf_counter()
    teacher, architecture, history = schooling.make(
        scale.pretraining, scale.unlabelled, seed, f"{schooling.name} teacher, seed {seed}"
    )
    seconds = time.perf_counter() - start
    save_vit(weights, teacher.cpu(), architecture)
    recipe = replace(scale.pretraining, **schooling.changes).describe()
    write_run(
        study.name,
        scale,
        f"teacher {schooling.name}",
        seed,
        recipe,
        {"pretraining_loss": history[-1]["loss"]},
        history,
        seconds,
        path,
    )


def trained(run: Run) -> nn.Module:
    """The trained model of a reported run, on the CPU: from its kept weights, or trained now, which writes
    its record too where it is missing."""
    variant, central = run.study.variant(run.variant), scale_of(run.transfer)
    scale = replace(
        central,
        labels=variant.labels or central.labels,
        student=Architecture(central.student.name, {**central.student.overrides, **variant.student}),
    )
    model = variant.build(Sources(run.transfer, scale, run.seed))
    student = student_of(model)
    if run.trial is None and run.path.exists() and run.weights.exists():
        load_weights(run.weights, student)
        return model
    recipe = _recipe(run, scale)
    images = scale.labelled(run.seed) if variant.images is None else variant.images(scale, run.seed)
    split = "test" if run.trial is None else "validation"
    results, history, seconds = teach(
        model, scale, recipe, run.seed, split, f"{variant.name}, seed {run.seed}", images, variant.stop_at
    )
    if run.trial is None:
        save_weights(run.weights, student)
    if not run.path.exists():
        described = (
            recipe.describe()
            | ({"stop_at": variant.stop_at} if variant.stop_at else {})
            | ({"plan": model.plan.describe()} if hasattr(model, "plan") else {})
        )
        write_run(
            run.study.name, scale, variant.name, run.seed, described, results, history, seconds, run.path
        )
    return model


def _run(run: Run) -> None:
    if not run.path.exists():
        trained(run)


def _schooled_weights(place: Place, schooling: Schooling, seed: int) -> Path:
    return place.work / f"teacher-{schooling.name}-seed{seed}.safetensors"


# --- What the studies are made of: functions from a seed's `Sources` to the model that is trained ---


def teacher_of(sources: Sources, schooling: Schooling | None) -> nn.Module:
    """The seed's central teacher, or the one that was made in another way."""
    return sources.teacher() if schooling is None else sources.schooled(schooling)


def with_new_head(vit: nn.Module, sources: Sources) -> nn.Module:
    """A pre-trained ViT, ready to be fine-tuned on the student's classes."""
    torch.manual_seed(sources.seed + AGAIN * sources.again)
    vit.reset_classifier(sources.scale.student.build().num_classes)
    return vit.requires_grad_(True)


def scratch(sources: Sources) -> nn.Module:
    """A student that gets nothing."""
    return sources.student()


def fine_tune(sources: Sources, schooling: Schooling | None = None) -> nn.Module:
    """The teacher's weights, with a new head."""
    return with_new_head(teacher_of(sources, schooling), sources)


def pair(plan: Plan, sources: Sources, schooling: Schooling | None = None) -> nn.Module:
    """A new student beside its teacher."""
    return AttentionTransfer(teacher_of(sources, schooling), sources.student(), plan)


def by(what: str = "map", how: str = "copy", schooling: Schooling | None = None, **options) -> partial:
    """`pair` with the plan that `what`, `how` and the further options of `Plan` make."""
    return partial(pair, Plan(what, how, **options), schooling=schooling)


def untrained_maps(sources: Sources, student: nn.Module | None = None) -> nn.Module:
    """The student with copied maps of a teacher that is only initialised."""
    student = sources.student() if student is None else student
    return AttentionTransfer(
        sources.scale.student.build(), student, Plan()
    )  # one stream of random numbers: not the student's weights again


def again(build: Callable[[Sources], nn.Module], sources: Sources) -> nn.Module:
    """The same once more with other first weights: what two runs of one method differ by."""
    return build(sources._replace(again=1))
