"""Studies: variants of the central experiment that change one thing at a time, tuned alike, over several
seeds; every run leaves a record. The central experiment is one of them, the one that the others start
from."""

import json
import multiprocessing
import os
import threading
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from atbook.lab.scales import (
    BLANK,
    CLASSIFYING,
    PHOTO_TWINS,
    TUNING_SEED,
    CifarScale,
    Made,
    Scale,
    Schooling,
    TeacherFailed,
    Worth,
    place_of_training,
    scales,
    twin_method,
)
from atbook.lab.tuning import best_of, to_try
from atbook.records import add_record, pack_bits, read_file, records_file
from atbook.worlds.glyphs import TWINS, World
from atfamily.detection.objects import ObjectImages
from atfamily.map_cache import fingerprint
from atlib._util import require_known, write_atomically
from atlib.attention_transfer import AttentionTransfer
from atlib.checkpoint import load_vit, read_tensors, save_vit, write_tensors
from atlib.data import Images
from atlib.evaluate import predict, score
from atlib.loading import seed_for
from atlib.objectives import Loss, student_loss
from atlib.pair import Pair, student_of
from atlib.plan import Plan
from atlib.recipe import Recipe
from atlib.train import Preempted, train
from atrun.checkpoint_manager import CheckpointManager
from atrun.record import Record, about, peak_memory_mb


class Place(NamedTuple):
    """Where experiments read and write. data: a folder with the scale's images (None: from the hub); results:
    the folder of all records, kept and committed; work: teachers and other weights, thrown away."""

    scale: str
    data: Path | None
    results: Path
    work: Path

    def records(self, experiment: str) -> Path:
        """The file of an experiment's records at this scale."""
        return records_file(experiment, self.scale, self.results)

    def teacher(self, seed: int, schooling: Schooling | None = None) -> Path:
        """The weights of a seed's teacher: the central one, or one that was made in another way."""
        return self.work / f"teacher-{f'{schooling.name}-' if schooling else ''}seed{seed}.safetensors"


def scale_of(place: Place) -> Scale:
    """The scale that a place names. Raises `ValueError` for an unknown one."""
    by_name = scales(place.data)
    require_known("scale", place.scale, by_name)
    return by_name[place.scale]


class Sources(NamedTuple):
    """What a variant can be built from: the models of one seed of the central experiment, and a new
    student."""

    place: Place
    scale: Scale  # its `student` is the variant's
    seed: int
    again: int = 0  # another number: other first weights from the same teacher and labels
    schooling: Schooling | None = None  # the variant's

    def teacher(self) -> VisionTransformer:
        """The pre-trained teacher of this seed: the variant's own, made as its schooling says, or the central
        one."""
        return load_vit(self.place.teacher(self.seed, self.schooling))

    def central_teacher(self) -> VisionTransformer:
        """The central teacher of this seed, for a variant that has one of its own too."""
        return load_vit(self.place.teacher(self.seed))

    def another_teacher(self) -> VisionTransformer:
        """A teacher pre-trained from another seed, on other images."""
        return load_vit(self.place.teacher(TUNING_SEED if self.seed != TUNING_SEED else 0))

    def fine_tuned(self) -> VisionTransformer:
        """The teacher of this seed, fine-tuned on the labels."""
        vit = scale_of(self.place).student.build()
        load_weights(fine_tuning(self.place, self.seed).weights, vit)
        return vit

    def model_of(self, study: "Study", method: str) -> nn.Module:
        """What another variant of a study has trained on this seed: for one that names it in `needs`."""
        variant = study.variant(method)
        model = variant.build(self._replace(schooling=variant.schooling))
        load_weights(built_on(study, self.place, method, self.seed).weights, student_of(model))
        return model

    def student(self) -> VisionTransformer:
        """A student fresh from its initialisation, which the seed decides."""
        self.seed_student()
        return self.scale.student.build()

    def seed_student(self) -> None:
        """What is built next has the first weights of this seed's student."""
        torch.manual_seed(seed_for(self.seed, "student", self.again))

    def unlabelled(self) -> Images:
        """Images without labels, for what is estimated from the teacher."""
        return self.scale.unlabelled_images(self.seed)


class Measure(NamedTuple):
    """What is measured on a trained model. of: (model, held-out images) -> {figure: number}, and under
    `RIGHT` which images it got right (`atbook.records.pack_bits`), where that can be said. figure: the one
    that trials are chosen by and tables show, more being better, from 0 to 1."""

    figure: str
    of: Callable[[nn.Module, Any], dict]


RIGHT = "right"


def _accuracy(model: nn.Module, images: Images) -> dict:
    logits = predict(model, images)
    scored = score(logits, images.targets)
    right = pack_bits(logits.argmax(1) == images.targets)
    return {"accuracy": scored.accuracy, "loss": scored.loss, RIGHT: right}


ACCURACY = Measure("accuracy", _accuracy)


@dataclass(frozen=True)
class Variant:
    """One way to teach a student."""

    # What records are keyed by.
    name: str
    # Makes what `train` is given.
    build: Callable[[Sources], nn.Module]
    # The method of the central experiment whose chosen recipe it starts from. None: it starts from the
    # scale's training recipe, and without trials of its own it is one of these methods, and chooses from the
    # scale's recipes for it.
    like: str | None = "copy"
    # To that recipe.
    changes: Mapping = field(default_factory=dict)
    # Further changes to choose from on the validation split, with the tuning seed.
    trials: Sequence[Mapping] = ()
    # Changes to the student's constructor arguments.
    student: Mapping = field(default_factory=dict)
    # Number of training images, None for the scale's.
    labels: int | None = None
    # (scale, seed) -> the training images, where they are not the scale's own.
    images: Callable[[Scale, int], Images] | None = None
    # Models it is built from beside the teacher of its seed: "fine-tuned", "another teacher", "central
    # teacher" (its schooling says that its own is another, or learns from the central one), or other variants
    # of its study by their names, which are then run first.
    needs: tuple[str, ...] = ()
    # How the teacher was made that it is built from; None: it is the central one.
    schooling: Schooling | None = None
    # The step of its recipe's schedule at which it ends, as a checkpoint along the run; None for the whole.
    stop_at: int | None = None
    # What the teacher sees in place of the student's image, in training and in evaluation; None: the image.
    twin: str | None = None
    # Of its training and test images, where it is another than the scale's.
    world: World | None = None
    # What its training makes small.
    loss: Loss = student_loss
    # What is measured on it.
    measure: Measure = ACCURACY
    # Changes that trials alone have beside, such as fewer steps.
    in_trials: Mapping = field(default_factory=dict)

    @property
    def needs_central(self) -> bool:
        """Whether it may ask for the central teacher of its seed."""
        if {"fine-tuned", "another teacher", "central teacher"} & {*self.needs}:
            return True
        untaught = getattr(self.build, "func", self.build) in (scratch, untrained_maps)
        return self.schooling is None and not untaught

    def base(self, scale: Scale, place: Place) -> Recipe:
        """The recipe that it starts from: the scale's, or the one chosen for `like`."""
        if self.like is None:
            return replace(scale.training, **self.changes)
        recipe = scale.recipe(scale.tuning[self.like][chosen(place, self.like)])
        return replace(recipe, **self.changes)

    def scale(self, central: Scale) -> Scale:
        """The central scale with this variant's labels, student and world."""
        return replace(
            central,
            labels=self.labels or central.labels,
            student=central.student._replace(overrides={**central.student.overrides, **self.student}),
            **({"world": self.world} if self.world else {}),
        )

    def choices(self, scale: Scale) -> Sequence[Mapping]:
        """Changes to that recipe, of which the best on the validation split is taken. Where the scale has one
        recipe for each method, so has every study."""
        if self.like is None:
            return self.trials or scale.tuning[self.name]
        return self.trials if self.trials and len(scale.tuning[self.like]) > 1 else ({},)


@dataclass(frozen=True)
class Study:
    """Variants that are compared with each other at one budget. What is not said here is explained in
    `experiments.toml`."""

    name: str
    variants: tuple[Variant, ...]
    shows: str = ""
    paper: str = ""
    seeds: int = 5
    only: tuple[str, ...] = ()

    def variant(self, name: str) -> Variant:
        """The variant of that name. Raises `ValueError` for an unknown one."""
        by_name = {variant.name: variant for variant in self.variants}
        require_known("method", name, by_name)
        return by_name[name]

    def needed_by(self, variants: Sequence[Variant]) -> list[Variant]:
        """Variants of this study that these are built from."""
        needs = {need for variant in variants for need in variant.needs}
        return [variant for variant in self.variants if variant.name in needs]

    @property
    def teachers(self) -> tuple[Schooling, ...]:
        """Those made for it, beside the central ones."""
        return schoolings_of(self.variants)


_EXPERIMENTS = tomllib.loads(Path(__file__).with_name("experiments.toml").read_text(encoding="utf-8"))


def described(name: str) -> dict[str, Any]:
    """What `experiments.toml` says of an experiment of the book."""
    entry = _EXPERIMENTS[name]
    return entry | {"only": tuple(entry.get("only", ()))}


def study(name: str, *variants: Variant) -> Study:
    """A study of the book, as `experiments.toml` describes it."""
    return Study(name, variants, **described(name))


def schoolings_of(variants: Sequence[Variant]) -> tuple[Schooling, ...]:
    """How the teachers were made that variants need beside the central ones, each once."""
    return tuple({v.schooling.name: v.schooling for v in variants if v.schooling is not None}.values())


# --- What the studies are made of: functions from a seed's `Sources` to the model that is trained ---


def with_new_head(vit: nn.Module, sources: Sources) -> nn.Module:
    """A pre-trained ViT, ready to be fine-tuned on the student's classes."""
    torch.manual_seed(seed_for(sources.seed, "head", sources.again))
    vit.reset_classifier(sources.scale.student.build().num_classes)
    return vit.requires_grad_(True)


def scratch(sources: Sources) -> nn.Module:
    """A student that gets nothing."""
    return sources.student()


def fine_tune(sources: Sources) -> nn.Module:
    """The teacher's weights, with a new head."""
    return with_new_head(sources.teacher(), sources)


def pair(plan: Plan, sources: Sources) -> nn.Module:
    """A new student beside its teacher."""
    return AttentionTransfer(sources.teacher(), sources.student(), plan)


def by(what: str = "map", how: str = "copy", **options) -> partial:
    """`pair` with the plan that `what`, `how` and the further options of `Plan` make."""
    return partial(pair, Plan(what, how, **options))


def untrained_maps(sources: Sources, student: nn.Module | None = None, plan: Plan = Plan()) -> nn.Module:
    """The student with maps, copied unless the plan says otherwise, of a teacher that is only initialised."""
    student = sources.student() if student is None else student
    torch.manual_seed(seed_for(sources.seed, "untrained", sources.again))
    return AttentionTransfer(sources.scale.student.build(), student, plan)


def again(build: Callable[[Sources], nn.Module], sources: Sources, number: int = 1) -> nn.Module:
    """The same once more with other first weights: what two runs of one method differ by."""
    return build(sources._replace(again=number))


# --- The central experiment: the same student taught in many ways; other studies start from what it chose ---


def _maps_of_the_fine_tuned(sources: Sources) -> nn.Module:
    return AttentionTransfer(sources.fine_tuned(), sources.student(), Plan())


CENTRAL = study(
    "transfer",
    Variant("scratch", scratch, None),
    Variant("fine-tune", fine_tune, None),
    Variant("copy", by(), None),
    Variant("copy-q", by("q"), None),
    Variant("copy-untrained", untrained_maps, None),
    Variant("copy-fine-tuned", _maps_of_the_fine_tuned, None, needs=("fine-tuned",)),
    Variant("distill", by(how="distill"), None),
    Variant("scratch-2", partial(again, scratch, number=1), "scratch"),
    Variant("scratch-3", partial(again, scratch, number=2), "scratch"),
    Variant("copy-k", by("k"), None),
    Variant("copy-v", by("v"), None),
    *(Variant(twin_method(twin), by(), None, twin=twin) for twin in (*TWINS, *PHOTO_TWINS, BLANK)),
    Variant("distill-long", by(how="distill"), None),
)


# --- Runs: what a variant is at a seed or a trial, and its model ---


class Run(NamedTuple):
    """One run of a study: a trial of the tuning (its index), or a reported run (None)."""

    study: Study
    place: Place
    method: str
    seed: int
    trial: int | None = None

    @property
    def key(self) -> tuple:
        """That of its record."""
        return "run" if self.trial is None else "trial", self.method, self.seed, self.trial

    def record(self) -> Record | None:
        """What is recorded of it; None while it has not been run."""
        records = read_file(self.place.records(self.study.name))
        return next((record for record in records if record.key == self.key), None)

    @property
    def weights(self) -> Path:
        """Where it keeps its student."""
        which = f"seed{self.seed}" if self.trial is None else f"trial{self.trial}"
        name = f"{self.method.replace(' ', '-')}-{which}.safetensors"
        return self.place.work / self.study.name / name


def chosen(place: Place, method: str, study: Study = CENTRAL) -> int:
    """The index of the recipe with the best validation accuracy among a method's choices, as
    `atbook.lab.tuning.best_of` says.

    Raises `FileNotFoundError` while one of them has no record.
    """
    choices = study.variant(method).choices(scale_of(place))
    if len(choices) == 1:
        return 0
    path = place.records(study.name)
    scores = _scores(path, study.variant(method), choices)
    if missing := to_try(choices, scores):
        raise FileNotFoundError(
            f"{method} is not tuned yet, {path} has no trial {missing[0]} of it: "
            f"run `python -m atbook experiment {study.name} --scale {place.scale}` first"
        )
    return best_of(choices, scores)


def at_an_end(study: Study, place: Place) -> list[str]:
    """The variants with reported runs whose search has not ended: their recipe lies at an end of what was
    tried, and a better one may lie beyond. `run_study` goes on with them."""
    scale, path = scale_of(place), place.records(study.name)
    reported = {record.method for record in read_file(path) if record.kind == "run"}
    with_runs = {v.name: v.choices(scale) for v in study.variants if v.name in reported}
    return [
        name
        for name, choices in with_runs.items()
        if to_try(choices, _scores(path, study.variant(name), choices))
    ]


def _scores(path: Path, variant: Variant, choices: Sequence[Mapping]) -> dict[int, float]:
    """What a variant's trials in a file of records have reached on the validation split, by the figure that
    they are chosen by. Raises `ValueError` for trials of other recipes than these."""
    scores, method = {}, variant.name
    for record in read_file(path):
        if (record.kind, record.method, record.seed) != ("trial", method, TUNING_SEED):
            continue
        expected = choices[record.trial] if record.trial < len(choices) else None
        if expected is None or not expected.items() <= record.config["recipe"].items():
            raise ValueError(
                f"{path}: trial {record.trial} of {method} was run with another recipe than {expected}, which"
                " the scale has now: move this file away, and tune anew"
            )
        scores[record.trial] = record.results[f"validation_{variant.measure.figure}"]
    return scores


def recipe_of(run: Run) -> Recipe:
    """The recipe of a trial, or the chosen one. Raises as `chosen` does."""
    variant, scale = run.study.variant(run.method), scale_of(run.place)
    trial = chosen(run.place, run.method, run.study) if run.trial is None else run.trial
    recipe = replace(variant.base(scale, run.place), **variant.choices(scale)[trial])
    return recipe if run.trial is None else replace(recipe, **variant.in_trials)


def built_on(study: Study, place: Place, method: str, seed: int) -> Run:
    """The run of a variant that others are built on; for the tuning seed, the chosen trial."""
    trial = None
    if seed == TUNING_SEED and len(study.variant(method).choices(scale_of(place))) > 1:
        trial = chosen(place, method, study)
    return Run(study, place, method, seed, trial)


def fine_tuning(place: Place, seed: int) -> Run:
    """The run that fine-tunes the teacher of a seed."""
    return built_on(CENTRAL, place, "fine-tune", seed)


def load_weights(path: Path, model: nn.Module) -> None:
    """Put the weights that a run has kept into a model."""
    model.load_state_dict(read_tensors(path)[0])


def trained(run: Run) -> nn.Module:
    """The trained model of a run, on the CPU: from its kept weights, or trained now, which writes its record
    too where it is missing."""
    variant = run.study.variant(run.method)
    scale = variant.scale(scale_of(run.place))
    model = variant.build(Sources(run.place, scale, run.seed, schooling=variant.schooling))
    student = student_of(model)
    is_recorded = run.record() is not None
    if is_recorded and run.weights.exists():
        load_weights(run.weights, student)
        return model
    recipe = recipe_of(run)
    if variant.images is None:
        images = scale.labelled(run.seed, twin=variant.twin)
    else:
        images = variant.images(scale, run.seed)
    # Tuning never sees a test image, and a reported run no other.
    split = "test" if run.trial is None else "validation"
    name = f"{run.method}, " + (f"seed {run.seed}" if run.trial is None else f"trial {run.trial}")
    start = time.perf_counter()
    sets = {split: scale.held_out(split, variant.twin)} | {
        f"{split}_{name}": images for name, images in scale.elsewhere(split, variant.twin).items()
    }
    results, history = teach(
        model, images, recipe, run.seed, sets, name, variant.stop_at, variant.loss, variant.measure
    )
    seconds = time.perf_counter() - start
    teaches = run.method in [variant.name for variant in run.study.needed_by(run.study.variants)]
    if run.trial is None or teaches or (variant.like is None and run.method == "fine-tune"):
        write_tensors(run.weights, student.state_dict(), {})
    if not is_recorded:
        described = recipe.describe() | ({"stop_at": variant.stop_at} if variant.stop_at else {})
        if variant.like is not None and hasattr(model, "plan"):  # a central method says it by its name
            described["plan"] = model.plan.describe()
        # whose teacher it is, is not said elsewhere
        if not scale.makes_teachers and not variant.needs and isinstance(model, Pair) and model.teachers:
            described["teacher"] = fingerprint(model.teacher)
        if not isinstance(student, VisionTransformer):  # a network in the place of the scale's student
            described["student"] = type(student).__name__
        write_run(run.study.name, run.place, scale, run.key, described, results, history, seconds)
    return model


def teach(
    student: nn.Module,
    images: Images | ObjectImages,
    recipe: Recipe,
    seed: int,
    sets: Mapping[str, Images | ObjectImages],
    name: str,
    stop_at: int | None = None,
    loss: Loss = student_loss,
    measure: Measure = ACCURACY,
) -> tuple[dict, list[dict]]:
    """Train a student in place on `images` and measure it on `sets`: results and history. Of the set "test"
    the results say which images were right, where the measure says it.

    stop_at: end after that many steps of the recipe, as a checkpoint along the run would be.
    """
    results = {}

    def metrics(model: nn.Module) -> dict:
        for name, images_of in sets.items():
            figures = measure.of(model, images_of)
            right = {f"{name}_{RIGHT}": figures.pop(RIGHT)} if RIGHT in figures else {}
            results.update({f"{name}_{figure}": value for figure, value in figures.items()})
            results.update(right if name == "test" else {})
        return {name: value for name, value in results.items() if name != f"test_{RIGHT}"}

    images, order = images.to(place_of_training()), seed_for(seed, "order")
    history = train(
        student, images, recipe, loss=loss, seed=order, evaluate=metrics, progress=name, stop_at=stop_at
    )
    return results, history


def make_teacher(place: Place, seed: int, study: Study = CENTRAL, schooling: Schooling | None = None) -> None:
    """Pre-train a seed's teacher, the central one or one of the study's own, keep its weights and write its
    record, where they are missing. Where the scale keeps it along the way, an interrupted one goes on; raises
    `Preempted` as `train` does."""
    weights = place.teacher(seed, schooling)
    key = "teacher", f"teacher {schooling.name}" if schooling else "teacher", seed, None
    path, scale, start = place.records(study.name), scale_of(place), time.perf_counter()
    record = next((record for record in read_file(path) if record.key == key), None)
    if record and record.config["unlabelled"] != scale.unlabelled:
        raise ValueError(
            f"{path}: {key[1]}, seed {seed}, learned from {record.config['unlabelled']} images, not"
            f" {scale.unlabelled}: move this file and {weights} away, and run it anew"
        )
    if record and weights.exists():
        return
    name = f"{key[1]}, seed {seed}"
    recipe, before = scale.pretraining, 0.0
    if schooling is not None:
        recipe = replace(scale.pretraining, **schooling.changes)
        central = partial(load_vit, place.teacher(seed))
        teacher, architecture, history = schooling.within(scale.world).make(
            scale.pretraining, scale.unlabelled, seed, name, central
        )
    elif scale.keep_every is None:
        teacher, architecture, history = scale.make_teacher(seed, name)
    else:
        (teacher, architecture, history), before = _go_on(scale, seed, name, weights.with_suffix(""))
    seconds = before + time.perf_counter() - start
    save_vit(weights, teacher.cpu(), architecture)
    recipe = replace(recipe, steps=history[-1]["step"])  # more of them, where its gate asked for it
    measured = {name: history[-1][name] for name in ("unlearned", "evenness") if name in history[-1]}
    results = {"pretraining_loss": history[-1]["loss"]} | measured
    if not record:
        write_run(study.name, place, scale, key, recipe.describe(), results, history, seconds)


def _go_on(scale: CifarScale, seed: int, name: str, folder: Path) -> tuple[Made, float]:
    """A teacher that is kept in `folder` along the way, and the seconds that earlier calls, which were
    stopped by SIGTERM, have spent on it."""
    start, clock = time.perf_counter(), folder / "seconds"
    before = float(clock.read_text()) if clock.exists() else 0.0
    try:
        return scale.make_teacher(seed, name, CheckpointManager(folder, scale.keep_every, last=1)), before
    except Preempted:
        write_atomically(clock, str(before + time.perf_counter() - start).encode())
        raise


def _of_scale(scale: Scale) -> dict:
    """What a record says of the scale that it was run at."""
    return {
        "scale": scale.name,
        "student": scale.student._asdict(),
        "labels": scale.labels,
        "unlabelled": scale.unlabelled,
    }


def write_run(
    experiment: str,
    place: Place,
    scale: Scale,
    key: tuple,
    recipe: dict,
    results: dict,
    history: list,
    seconds: float,
) -> None:
    """Write the record of a finished run, with the memory of this process and what it ran on. key: kind,
    method, seed and trial."""
    kind, method, seed, trial = key
    config = _of_scale(scale) | {"recipe": recipe}
    record = Record(
        experiment,
        method,
        seed,
        config,
        results,
        history,
        round(seconds, 2),
        round(peak_memory_mb(), 1),
        about(place_of_training()),
        kind,
        trial,
    )
    add_record(place.records(experiment), record)


# --- Running a study ---


def run_study(
    study: Study, place: Place, seeds: int, methods: list[str] | None = None, jobs: int = 1
) -> list[Record]:
    """Tune and run the study's variants (`methods`: only some) for seeds 0 to seeds - 1 and return the
    records of these runs.

    What already has a record is not run again, so an interrupted study goes on where it stopped; models that
    are missing are made. `jobs` runs go side by side, one thread each. Raises `FileNotFoundError` when the
    central experiment, which other studies start from, has not been tuned, `ValueError` for a scale that the
    study is not made for, and `TeacherFailed` as `require_worth` does.
    """
    scale = scale_of(place)
    require_made_for(study, place)
    if seeds > TUNING_SEED:
        raise ValueError(
            f"at most {TUNING_SEED} seeds: seed {TUNING_SEED} is the one that recipes are tuned on, got"
            f" {seeds}"
        )
    available = [v.name for v in study.variants if study is not CENTRAL or v.name in scale.methods]
    names = tuple(dict.fromkeys(methods or available))
    for name in names:
        require_known("method", name, available)
    variants = [study.variant(name) for name in names]
    first = study.needed_by(variants)
    tuned_here = {variant.name for variant in variants} if study is CENTRAL else set()
    check_tuned([variant for variant in (*first, *variants) if variant.like not in tuned_here], place)
    if study is CENTRAL and scale.worth is not None:
        require_worth(scale.worth, place, jobs)
    if study is CENTRAL and any("fine-tuned" in variant.needs for variant in variants):
        _run_variants(study, [study.variant("fine-tune")], place, seeds, jobs)
    if first:
        _run_variants(study, first, place, seeds, jobs)
    _run_variants(study, variants, place, seeds, jobs)
    wanted = [Run(study, place, variant.name, seed).key for variant in variants for seed in range(seeds)]
    records = {record.key: record for record in read_file(place.records(study.name))}
    return [records[key] for key in wanted]


def require_made_for(experiment: Any, place: Place) -> None:
    """That a study or an examination is made for a place's scale: one of its `only`, where there are any,
    else one whose students are classifiers. Raises `ValueError` where it is not."""
    if experiment.only:
        require_known("scale", place.scale, experiment.only)
    elif not scale_of(place).methods:
        raise ValueError(
            f"{experiment.name} compares classifiers, and the scale {place.scale!r} has none: choose"
            f" one of {', '.join(CLASSIFYING)}"
        )


def require_worth(worth: Worth, place: Place, jobs: int) -> None:
    """Make the tuning seed's teacher, tune scratch and fine-tune with it, and raise `TeacherFailed` unless it
    is worth what the scale asks for. All that is measured is in the records of this teacher and these trials.
    """
    ends, key = ("scratch", "fine-tune"), ("teacher", "teacher", TUNING_SEED, None)
    if all(record.key != key for record in read_file(place.records(CENTRAL.name))):
        run_each(make_teacher, [(place, TUNING_SEED)], jobs)
    _run_variants(CENTRAL, [CENTRAL.variant(name) for name in ends], place, 0, jobs)
    path, tuning = place.records(CENTRAL.name), scale_of(place).tuning
    scratch, fine_tuned = (max(_scores(path, CENTRAL.variant(name), tuning[name]).values()) for name in ends)
    (evenness,) = (record.results["evenness"] for record in read_file(path) if record.key == key)
    if fine_tuned - scratch < worth.gain or evenness > worth.evenness:
        raise TeacherFailed(
            f"the teacher of seed {TUNING_SEED} brings fine-tuning {100 * (fine_tuned - scratch):+.1f} points"
            f" against scratch on validation images, where {100 * worth.gain:+.1f} are asked for; its maps"
            f" have {evenness:.3f} of the entropy of uniform ones, where {worth.evenness:g} is the most: no"
            " other teacher or student was trained; the scale needs a longer pre-training"
            " (`atbook.lab.scales`)"
        )


def check_tuned(variants: list[Variant], place: Place) -> None:
    """Before hours are spent: the recipes that the variants start from must have been chosen. Raises as
    `run_study` does."""
    for like in dict.fromkeys(variant.like for variant in variants if variant.like is not None):
        if like not in scale_of(place).tuning:
            raise ValueError(
                f"a variant starts from the recipe of {like!r}, which the scale {place.scale!r} does not run;"
                " choose others with --methods, or another scale"
            )
        chosen(place, like)


def _run_variants(study: Study, variants: list[Variant], place: Place, seeds: int, jobs: int) -> None:
    scale, path = scale_of(place), place.records(study.name)

    def trials() -> list[Run]:
        """Those that the search asks for next, of all variants together."""
        return [
            Run(study, place, variant.name, TUNING_SEED, trial)
            for variant in variants
            for recipes in [variant.choices(scale)]
            for trial in to_try(recipes, _scores(path, variant, recipes))
        ]

    runs = [Run(study, place, variant.name, seed) for variant in variants for seed in range(seeds)]
    by_key = {record.key: record for record in read_file(path)}
    missing = [run for run in runs if run.key not in by_key]
    make_models(study, variants, place, sorted({run.seed for run in (*trials(), *missing)}), jobs)
    while waiting := trials():
        run_each(make_run, [(run,) for run in waiting], jobs)
    for variant in variants:
        recorded = [by_key[run.key] for run in runs if run.method == variant.name and run.key in by_key]
        if recorded:
            recipe = recipe_of(Run(study, place, variant.name, 0))
            _require_same(recorded, recipe, variant.scale(scale), path)
    run_each(make_run, [(run,) for run in missing], jobs)


def _require_same(records: Sequence[Record], recipe: Recipe, scale: Scale, path: Path) -> None:
    """That records of one variant are of the recipe that is chosen now, and of the scale as it is now: a run
    is known by its method and seed alone, so it could be from before its scale was changed. A setting that a
    recipe did not have yet was at its default. Raises `ValueError` where one is not."""
    now = json.loads(json.dumps(_of_scale(scale)))
    for record in records:
        config = record.config
        changed = [f"{key} {config.get(key)}, not {now[key]}" for key in now if config.get(key) != now[key]]
        if Recipe.described(record.config["recipe"]) != recipe:
            changed.append("another recipe than is chosen now")
        if changed:
            raise ValueError(
                f"{path}: {record.method}, seed {record.seed}, was run with {'; '.join(changed)}: move this"
                " file away, and run it anew"
            )


def make_models(study: Study, variants: list[Variant], place: Place, seeds: list[int], jobs: int) -> None:
    """Make the teachers that the variants are built from, for these seeds, where they are missing: none where
    no seed is to be run."""
    if not seeds:
        return
    first = study.needed_by(variants)
    needs = {need for variant in variants for need in variant.needs}
    others = {TUNING_SEED} - {*seeds} if "another teacher" in needs else ()
    if scale_of(place).makes_teachers and any(variant.needs_central for variant in (*first, *variants)):
        run_each(make_teacher, [(place, seed) for seed in [*seeds, *others]], jobs)
    runs = [fine_tuning(place, seed) for seed in seeds] if "fine-tuned" in needs else []
    runs += [built_on(study, place, variant.name, seed) for variant in first for seed in seeds]
    missing = [(run,) for run in runs if run.record() is None or not run.weights.exists()]
    run_each(make_run, missing, jobs)
    schooled = [
        (place, seed, study, schooling) for schooling in schoolings_of([*first, *variants]) for seed in seeds
    ]
    run_each(make_teacher, schooled, jobs)


def make_run(run: Run) -> None:
    """Train a run for its record and weights: no model is handed from process to process."""
    trained(run)


def run_each(function, arguments: list[tuple], jobs: int) -> None:
    """Call `function` with each tuple of arguments, `jobs` at a time; the first failure ends it all.

    Every call has a process of its own, so that its peak memory is its own and nothing carries over. They are
    forked from one that has imported everything: importing takes longer than some runs.
    """
    if jobs == 1:
        for call in arguments:
            function(*call)
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(jobs, context, _prepare_worker, max_tasks_per_child=1) as pool:
        try:
            for waiting in [pool.submit(function, *call) for call in arguments]:
                waiting.result()
        except BaseException:  # an interruption too: what has not begun is not begun
            pool.shutdown(cancel_futures=True)
            raise


def _prepare_worker() -> None:
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A worker whose parent was ended, by SIGTERM for one, has nobody to work for: records are written whole
    or not at all, so it may end at any moment."""
    multiprocessing.parent_process().join()
    os._exit(1)
