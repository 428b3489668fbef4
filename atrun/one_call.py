"""`python -m atlib transfer`, in Python `atlib.transfer`: from a teacher and photographs to a student in one
call, and several methods on the same photographs in one table."""

import argparse
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from atfamily.measures.predictions import Interval, paired_bootstrap
from atlib._util import write_atomically
from atlib.checkpoint import read_header, save_vit
from atlib.compatibility import sizes_of
from atlib.evaluate import predict
from atlib.pair import Normalisation, config_of
from atlib.processes import processes_asked
from atlib.student import built_with
from atlib.vit import Architecture
from atrun import generic
from atrun.build import held_out, says_classes, teacher_of, training_images
from atrun.checkpoint_manager import digest
from atrun.classes import require_classes
from atrun.commands import dry_run, summary, until_stopped
from atrun.config import UNTRAINED, RunConfig, read_config
from atrun.configure import configured, teacher_name
from atrun.data.catalogue import SPLIT_NAMES
from atrun.data.folders import pictures_below
from atrun.measure import readable, tested_anew
from atrun.method import DERIVED, Method, method_of_run
from atrun.overrides import pairs
from atrun.record import Record
from atrun.report import in_points, run_report, table_report
from atrun.runner import TEACHER_SHA, device, is_finished, load_result, note, resume, start, weights_of

METHODS = tuple(name.value for name in DERIVED if not name.is_unlabelled)


class Trained(NamedTuple):
    """What `transfer` has made. student: in eval mode, after Copy with its teacher; report: what the run says
    at its end; folder: the run's; right: (n,) of truths, of its evaluation's images, None without labels."""

    student: nn.Module
    record: Record
    report: str
    folder: Path
    right: Tensor | None


class Table(NamedTuple):
    """Methods on the same photographs, with the same student. rows: {method: "accuracies", "seconds" of
    training and "folders", each a list over seeds}; differences: {(method, other): the first's mean accuracy
    less the second's, with its 95 % interval over other images, not other seeds}; images: that they are
    measured on."""

    rows: dict[str, dict[str, list]]
    differences: dict[tuple[str, str], Interval]
    images: int

    def describe(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "images": self.images,
            "methods": self.rows,
            "differences": [
                {"first": first, "second": second, **interval._asdict()}
                for (first, second), interval in self.differences.items()
            ],
        }

    def text(self) -> str:
        """A line for each method: mean accuracy, that of each seed, the difference to the first method."""
        base = next(iter(self.rows))
        lines = [f"accuracy on the same {self.images:,} images; difference to {base}, 95 % interval"]
        for name, row in self.rows.items():
            of_seeds = " ".join(f"{100 * accuracy:.2f}" for accuracy in row["accuracies"])
            mean = 100 * sum(row["accuracies"]) / len(row["accuracies"])
            line = f"{name:12} {mean:6.2f} %  ({of_seeds})"
            if name != base:
                line += f"  {in_points(*self.differences[name, base])}"
            lines.append(f"{line}  {sum(row['seconds']):.0f} s")
        return "\n".join(lines)


def transfer(
    teacher: str | Path | nn.Module,
    data: str | Path,
    student: str | None = "small",
    method: str = "distill",
    *,
    out: str | Path,
    seed: int = 0,
    settings: Mapping[str, str] = {},
) -> Trained:
    """Train a student of a teacher on photographs: `python -m atlib transfer`, with its rules and files.

    teacher: a timm name, a file, or a ViT of timm, torchvision or transformers, which is written beside
    `out`; data: a folder, or a name of the catalogue; a flat folder trains by the transfer loss alone.
    student: "tiny", "small", "half", a timm name, or None for the teacher's size. method: one of `METHODS`.
    out: the run's folder, in which an interrupted run goes on. settings: {"epochs": "20"}.
    """
    out, method = Path(out), _method_on(method, data)
    given, settings = _teacher_file(teacher, out, settings)
    config, rules, words = _configured(given, str(data), student, method, settings, seed)
    note(rules)
    return _carried_out(config, rules, words, out)


def compare_methods(
    teacher: str | Path | nn.Module,
    data: str | Path,
    methods: Sequence[str],
    student: str | None = "small",
    *,
    out: str | Path,
    seeds: int = 3,
    settings: Mapping[str, str] = {},
) -> Table:
    """`transfer` by each of some methods with each seed, in OUT/METHOD-SEED, and how the students differ on
    the same images, in OUT/table.json and OUT/report.html too. What is finished is not repeated.

    Logits need a teacher of the data's classes: another one is first fine-tuned, in OUT/teacher.
    """
    out = Path(out)
    if is_flat(data) or not methods or seeds < 1:
        raise ValueError(f"data={str(data)!r}, methods={methods}, seeds={seeds}: labels, a method and a seed")
    given, settings = _teacher_file(teacher, out, settings)
    methods = [method_of_run(name) for name in dict.fromkeys(methods)]
    tuned = out / "teacher"
    if any(method.reads_logits for method in methods) and not says_classes(teacher_name(str(given))):
        note(f"logits: the teacher learns these classes first, in {tuned}")
        transfer(given, data, None, Method.FINE_TUNE, out=tuned, settings=settings)
    else:
        tuned = given
    runs = {}  # all are configured before the first is carried out
    for method in methods:  # each once: a teacher's file is read for it, and images are counted
        method_teacher = str(tuned if method.reads_logits else given)
        config, rules, words = _configured(method_teacher, str(data), student, method, settings, 0)
        note(rules)
        for seed in range(seeds):
            runs[str(method), seed] = replace(config, seed=seed), rules, words
    rows, right = {}, {}
    for name in map(str, methods):
        trained = [_carried_out(*runs[name, seed], out / f"{name}-{seed}") for seed in range(seeds)]
        right[name] = torch.stack([of_seed.right for of_seed in trained])
        rows[name] = {
            "accuracies": right[name].double().mean(1).tolist(),
            "seconds": [of_seed.record.seconds for of_seed in trained],
            "folders": [str(of_seed.folder) for of_seed in trained],
        }
    differences = {(b, a): paired_bootstrap(right[b], right[a]) for a, b in combinations(right, 2)}
    table = Table(rows, differences, next(iter(right.values())).shape[1])
    write_atomically(out / "table.json", (json.dumps(table.describe(), indent=1) + "\n").encode())
    config, *_ = next(iter(runs.values()))
    words = ["transfer", "--teacher", teacher_name(str(given)), "--data", config.data]
    words += ["--student", student or "teacher", "--methods", *rows, "--seeds", str(seeds)]
    table_report(out, words + _as_words(settings), table)
    return table


def is_flat(data: str | Path) -> bool:
    """Whether data are a folder of images without folders of classes, in splits or not."""
    folder = Path(data)
    if not folder.is_dir():
        return False
    splits = {name for names in SPLIT_NAMES.values() for name in names}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # whoever reads them says what is not read
        places = {file.relative_to(folder).parent.parts for file in pictures_below(folder)}
    return bool(places) and all(len(parts) < 2 and {*map(str.lower, parts)} <= splits for parts in places)


def _method_on(method: str, data: str | Path) -> Method:
    """The method, on a flat folder its form without labels."""
    chosen = method_of_run(method)
    if not is_flat(data) or chosen.pretrains:
        return chosen
    if chosen not in (Method.DISTILL, Method.FEATURES):
        raise ValueError(f"{method} needs labels, a folder for each class; distill and features need none")
    return Method(f"{chosen}-unlabelled")


def _teacher_file(
    teacher: str | Path | nn.Module, out: Path, settings: Mapping[str, str]
) -> tuple[str, Mapping[str, str]]:
    """A teacher's name or path, a live one written beside `out`, and settings with what it does not say."""
    if isinstance(teacher, (str, Path)):
        return str(teacher), settings
    sizes = sizes_of(teacher)
    path, library = out.with_name(f"{out.name}-teacher"), type(teacher).__module__.partition(".")[0]
    path.parent.mkdir(parents=True, exist_ok=True)
    normalisation = Normalisation.of(teacher)
    if library == "transformers":
        teacher.save_pretrained(path)
        if normalisation is not None:
            stated = {"image_mean": normalisation.mean, "image_std": normalisation.std}
            (path / "preprocessor_config.json").write_text(json.dumps(stated))
        return str(path), settings
    if library == "torchvision":
        path = path.with_name(f"{path.name}.pth")  # a name may hold dots
        torch.save(teacher.state_dict(), path)
        parts = {} if normalisation is None else vars(normalisation)
        stated = {f"teacher_{name}": json.dumps(value) for name, value in parts.items()}
        return str(path), {"teacher_heads": str(sizes.heads), **stated, **settings}
    if not config_of(teacher):
        raise ValueError(f"a {type(teacher).__name__} cannot be written as a file: use AttentionTransfer")
    name, arguments = built_with(teacher)
    arguments = {"num_classes": teacher.num_classes, **arguments}
    path = path.with_name(f"{path.name}.safetensors")
    return str(save_vit(path, teacher, Architecture(name, arguments))), settings


def _configured(
    teacher: str, data: str, student: str | None, method: Method, settings: Mapping[str, str], seed: int
) -> tuple[RunConfig, str, list[str]]:
    """A run, what was derived for it, and the command that repeats it."""
    teacher = teacher_name(teacher)
    if method is not Method.FINE_TUNE:  # which begins with the teacher's weights
        settings = generic.student_settings(student, teacher, settings)
    config, rules = configured(method, data, teacher, settings, seed)
    words = ["train", "--recipe", method, "--data", config.data, "--teacher", teacher]
    return config, rules, words + _as_words(settings)


def _as_words(settings: Mapping[str, str]) -> list[str]:
    return [word for name, text in settings.items() for word in (f"--{name}", text)]


def _carried_out(config: RunConfig, rules: str, words: Sequence[str], folder: Path) -> Trained:
    """The run in its folder, begun, gone on with, or only read, where it is finished; and its page."""
    if processes_asked() > 1:
        raise ValueError(f"one process measures and reports: under a launcher `{' '.join(words[:3])}`")
    images, finished = training_images(config), is_finished(folder, config)
    if not (folder / "config.json").exists():
        record = start(config, folder, images)
    elif read_config(folder, trust_data=True).fingerprint() != config.on(len(images)).fingerprint():
        raise ValueError(f"{folder} holds another run: choose another --out")
    else:
        record = resume(folder, trust_data=True)
    student, right = load_result(weights_of(folder)), None
    tested_on = None if config.method.pretrains else held_out(read_config(folder, trust_data=True))
    if finished:
        _require_unchanged(folder, config, tested_on)
    if tested_on is not None:
        answers = predict(student.to(device()), tested_on).argmax(1)
        if len(answers) < len(tested_on):  # some cannot be decoded
            tested_on = tested_on.select(readable(tested_on))
        right = answers == tested_on.targets
    teacher = None  # a teacher that the student does not keep, and does not start from
    if config.teacher not in (None, UNTRAINED) and config.method not in (Method.COPY, Method.FINE_TUNE):
        teacher = teacher_of(config).vit
    words = [*words, "--seed", str(config.seed)]
    page = run_report(folder, words, rules, student.cpu(), record, tested_on, right, teacher)
    return Trained(student, record, f"{summary(folder, record)}\nreport: {page}", folder, right)


def _require_unchanged(folder: Path, config: RunConfig, tested_on) -> None:
    """Raise `ValueError` where a finished run had another teacher, classes or test images than there are."""
    weights = weights_of(folder)
    taught_by = read_header(weights).get(TEACHER_SHA)
    if taught_by is not None and taught_by != digest(Path(config.teacher)):
        raise ValueError(f"{config.teacher} has changed since {folder} ended: choose another --out")
    if config.classifies:
        require_classes(weights, tested_on)
        if tested_anew(weights, config, config.evaluation_split, tested_on):
            raise ValueError(f"the test images of {folder} have changed since it ended: choose another --out")


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    parser.add_argument("--teacher", required=True, help="a timm name, a file of weights, or a run's folder")
    data = "folders of images, one for each class; a flat folder trains by the transfer loss alone"
    parser.add_argument("--data", metavar="NAME|PATH", required=True, help=data)
    student = "tiny, small, half, a timm name, or teacher, for its size (default: small)"
    parser.add_argument("--student", metavar="SIZE|NAME", default="small", help=student)
    methods = f"one, or several for a table: {', '.join(METHODS)} (default: distill)"
    methods_options = {"nargs": "+", "choices": METHODS, "default": ["distill"], "metavar": "METHOD"}
    parser.add_argument("--methods", **methods_options, help=methods)
    parser.add_argument("--seeds", type=int, default=1, help="runs of each method (default: 1)")
    out = "the run's folder; of several runs, which are OUT/METHOD-SEED, that of their table"
    parser.add_argument("--out", type=Path, metavar="DIR", help=out)
    dry = "print the student, the pairs of layers and the cost of each method; train nothing"
    parser.add_argument("--dry-run", action="store_true", help=dry)
    parser.epilog = "Settings are further options, --epochs 20: `python -m atlib train --settings` lists them"
    parser.set_defaults(run=transfer_command, takes_settings=True)


def transfer_command(arguments: argparse.Namespace) -> int:
    student = None if arguments.student == "teacher" else arguments.student
    if arguments.dry_run:
        return _dry_run(arguments, student)
    if arguments.out is None:
        raise ValueError("--out DIR is missing: where shall the files go? (--dry-run needs none)")
    options = {"out": arguments.out, "settings": pairs(arguments.settings)}
    of = arguments.teacher, arguments.data

    def run() -> str:
        if len(arguments.methods) == arguments.seeds == 1:
            return transfer(*of, student, arguments.methods[0], **options).report
        table = compare_methods(*of, arguments.methods, student, seeds=arguments.seeds, **options).text()
        return f"{table}\ntable: {arguments.out / 'table.json'}\nreport: {arguments.out / 'report.html'}"

    return until_stopped(run, "the same command goes on")


def _dry_run(arguments: argparse.Namespace, student: str | None) -> int:
    """What each method would be and cost; of logits of a teacher of other classes its fine-tuning."""
    for name in dict.fromkeys(arguments.methods):
        method = _method_on(name, arguments.data)
        if method.reads_logits and not says_classes(teacher_name(arguments.teacher)):
            print(f"{name}: first the teacher learns these classes, by {Method.FINE_TUNE}")
            method = Method.FINE_TUNE
        of = arguments.teacher, arguments.data, student, method, pairs(arguments.settings), 0
        config, rules, _ = _configured(*of)
        note(rules)
        dry_run(config)
    if arguments.seeds > 1:
        print(f"{arguments.seeds} runs of each method, one a seed")
    return 0
