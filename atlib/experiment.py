"""The central experiment: the same student taught in six ways, tuned alike, over several seeds; every run leaves a record."""

import copy
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from atlib.checkpoint import Architecture, load_vit, save_vit, save_weights
from atlib.data import Images
from atlib.evaluate import evaluate
from atlib.names import require_known
from atlib.record import Record, about, peak_memory_mb, read_record, write_record
from atlib.recipes import Recipe
from atlib.scales import TUNING_SEED, Scale, scales
from atlib.train import train
from atlib.plan import Plan
from atlib.transfer import AttentionTransfer


class Job(NamedTuple):
    """One run: a trial of the tuning (`trial` is its index in the method's grid) or a reported run (`trial` is None)."""

    method: str
    seed: int
    trial: int | None

    @property
    def name(self) -> str:
        return f"{self.method}-seed{self.seed}" if self.trial is None else f"tuning/{self.method}-trial{self.trial}"


class Place(NamedTuple):
    """Where an experiment reads and writes. records: kept and committed; work: teachers and other weights, thrown away."""

    scale: str
    data: Path | None
    records: Path
    work: Path


def build_student(method: str, teacher: VisionTransformer, fine_tuned: VisionTransformer | None, architecture: Architecture,
                  seed: int) -> nn.Module:
    """The untrained student of a method: what `train` is given.

    scratch: a new ViT. fine-tune: the teacher's weights, a new head. copy, distill: a new ViT with the teacher's maps.
    copy-q: a new ViT with the teacher's queries. copy-untrained: maps of a teacher that is only initialised. copy-fine-tuned: maps of the fine-tuned
    teacher.
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
                raise ValueError("copy-fine-tuned needs the fine-tuned teacher: run the method 'fine-tune' first")
            return AttentionTransfer(copy.deepcopy(fine_tuned), student, Plan(how="copy"))
        case "distill":
            return AttentionTransfer(copy.deepcopy(teacher), student, Plan(how="distill"))
    raise ValueError(f"unknown method {method!r}")


def run_experiment(place: Place, seeds: int, methods: list[str], jobs: int = 1) -> list[Path]:
    """Tune and run `methods` for seeds 0 to seeds - 1 and return the paths of the reported records.

    What already has a record is not run again, so an interrupted experiment goes on where it stopped. `jobs` runs go side by
    side, one thread each. fine-tune goes first where copy-fine-tuned needs its weights.
    """
    scale = scale_of(place)
    if seeds > TUNING_SEED:
        raise ValueError(f"at most {TUNING_SEED} seeds: seed {TUNING_SEED} is the one that recipes are tuned on, got {seeds}")
    for method in methods:
        require_known("method", method, scale.methods)
    tuned = any(len(scale.tuning[m]) > 1 for m in methods)
    all_seeds = [*range(seeds), *([TUNING_SEED] if tuned else [])]
    run_each(make_teacher, [(place, seed) for seed in all_seeds], jobs)
    first = [m for m in ("fine-tune",) if m in methods or "copy-fine-tuned" in methods]
    reported = []
    for group in (first, [m for m in methods if m not in first]):
        trials = [Job(m, TUNING_SEED, t) for m in group for t in range(len(scale.tuning[m])) if len(scale.tuning[m]) > 1]
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
        raise FileNotFoundError(f"{method} is not tuned yet, {missing[0]} does not exist: "
                                f"run `python -m atlib experiment transfer --scale {place.scale}` first")
    scores = [read_record(path).results["validation_accuracy"] for path in paths]
    return max(range(trials), key=lambda t: scores[t])


def scale_of(place: Place) -> Scale:
    """The scale that a place names. Raises `ValueError` for an unknown one."""
    known = scales(place.data)
    require_known("scale", place.scale, known)
    return known[place.scale]


def make_teacher(place: Place, seed: int) -> None:
    """Pre-train the teacher of a seed, keep its weights and write its record, unless both are there."""
    record_path, weights = place.records / f"teacher-seed{seed}.json", place.work / f"teacher-seed{seed}.safetensors"
    if record_path.exists() and weights.exists():
        return
    scale, start = scale_of(place), time.perf_counter()
    teacher, architecture, history = scale.make_teacher(seed, progress=f"teacher, seed {seed}")
    seconds = time.perf_counter() - start
    save_vit(weights, teacher.cpu(), architecture)
    write_run("transfer", scale, "teacher", seed, scale.pretraining.describe(), {"pretraining_loss": history[-1]["loss"]}, history,
              seconds, record_path)


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
    recipe = scale.recipe(scale.tuning[job.method][chosen(place, job.method) if job.trial is None else job.trial])

    split = "test" if job.trial is None else "validation"  # tuning never sees a test image, and a reported run no other
    results, history, seconds = teach(student, scale, recipe, job.seed, split, job.name)
    if is_teacher:
        vit = scale.student.build()
        vit.load_state_dict(student.state_dict())
        save_vit(weights, vit, scale.student)
    if job.trial is None:  # for examinations of the trained models
        save_weights(student_weights(place, job), getattr(student, "student", student))
    write_run("transfer", scale, job.method, job.seed, recipe.describe(), results, history, seconds, path)


def teach(student: nn.Module, scale: Scale, recipe: Recipe, seed: int, split: str, name: str,
          images: Images | None = None, stop_at: int | None = None) -> tuple[dict, list[dict], float]:
    """Train a student in place on its seed's labels (or on `images`) and evaluate it on `split`: results, history, seconds of both.

    stop_at: end after that many steps of the recipe, as a checkpoint along the run would be.
    """
    sets = {split: scale.held_out(split)} | {f"{split}_{name}": images for name, images in scale.elsewhere(split).items()}

    def metrics(model: nn.Module) -> dict:
        found = {name: evaluate(model, images) for name, images in sets.items()}
        return {f"{name}_accuracy": each.accuracy for name, each in found.items()} | {f"{name}_loss": each.loss for name, each in found.items()}

    start = time.perf_counter()
    history = train(student, scale.labelled(seed) if images is None else images, recipe, seed=seed, evaluate=metrics, progress=name, stop_at=stop_at)
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


def write_run(experiment: str, scale: Scale, method: str, seed: int, recipe: dict, results: dict, history: list,
              seconds: float, path: Path) -> None:
    """Write the record of a finished run, with the memory of this process and what it ran on."""
    config = {"scale": scale.name, "student": scale.student._asdict(), "labels": scale.labels, "unlabelled": scale.unlabelled, "recipe": recipe}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    write_record(path, Record(experiment, method, seed, config, results, history, round(seconds, 2), round(peak_memory_mb(), 1), about(device)))


def run_each(function, arguments: list[tuple], jobs: int, fresh: bool = True) -> None:
    """Call `function` with each tuple of arguments, `jobs` at a time; the first failure ends it all.

    `fresh`: every call in a process of its own, so that its peak memory is its own and nothing carries over; short runs that
    would spend a seventh of their time on imports do without, and their peak memory is that of a process that has run others.
    """
    if jobs == 1:
        for each in arguments:
            function(*each)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=torch.set_num_threads, initargs=(1,),
                             max_tasks_per_child=1 if fresh else None) as pool:
        for waiting in [pool.submit(function, *each) for each in arguments]:
            waiting.result()
