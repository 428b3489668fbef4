"""Examine the trained models of a study: what is measured on them after training, alone or against each other, leaves records too."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from atlib.experiment import Place, run_each, scale_of, write_run
from atlib.study import Run, Sources, Study, make_models, trained


@dataclass(frozen=True)
class Examination:
    """A measurement on the trained models of `study`, one seed at a time.

    methods: which of the study's variants. measure: ({method: trained model}, the seed's sources) -> {name of a record: its results}.
    alone: every model is measured by itself, so that one can be added later. shows, paper, seeds, minutes, only: as in `Study`.
    """

    name: str
    shows: str
    paper: str
    study: Study
    methods: tuple[str, ...]
    measure: Callable[[Mapping[str, nn.Module], Sources], Mapping[str, Mapping]]
    seeds: int = 5
    minutes: int = 10
    only: str | None = "built-in"
    alone: bool = False


def run_examination(examination: Examination, transfer: Place, records: Path, seeds: int, methods: list[str] | None = None,
                    jobs: int = 1) -> list[Path]:
    """Measure the models of seeds 0 to seeds - 1 (`methods`: only some) and return the paths of the records.

    Models whose weights are not kept are trained first. What has a record is not measured again: a model that is measured alone, else a seed.
    Raises `ValueError` for a scale that it is not made for and for an unknown method.
    """
    study, methods = examination.study, tuple(methods or examination.methods)
    if examination.only not in (None, transfer.scale):
        raise ValueError(f"{examination.name} is made for the scale {examination.only!r}, not for {transfer.scale!r}")
    for method in methods:
        study.variant(method)
    missing = {seed: [method for method in methods if not _record(records, method, seed).exists()] for seed in range(seeds)}
    missing = {seed: some if examination.alone else list(methods) for seed, some in missing.items() if some}
    if missing:
        variants = [study.variant(method) for method in methods if any(method in some for some in missing.values())]
        make_models(study, variants, transfer, study_records(study, transfer), list(missing), jobs)
        run_each(_train, [(_run(study, transfer, method, seed),) for seed, some in missing.items() for method in some], jobs, fresh=False)
        run_each(_measure, [(examination, transfer, records, tuple(some), seed) for seed, some in missing.items()], jobs)
    return sorted(records.glob("*-seed*.json"))


def study_records(study: Study, transfer: Place) -> Path:
    """The folder of a study's records, beside that of the central experiment's."""
    return transfer.records.parent.parent / study.name / transfer.scale


def model_of(study: Study, transfer: Place, method: str, seed: int) -> nn.Module:
    """A trained model of a study, from kept weights or trained now."""
    return trained(_run(study, transfer, method, seed)).eval()


def _run(study: Study, transfer: Place, method: str, seed: int) -> Run:
    return Run(study, transfer, study_records(study, transfer), method, seed)


def _train(run: Run) -> None:
    trained(run)


def _measure(examination: Examination, transfer: Place, records: Path, methods: tuple[str, ...], seed: int) -> None:
    scale, start = scale_of(transfer), time.perf_counter()
    models = {method: model_of(examination.study, transfer, method, seed) for method in methods}
    found = examination.measure(models, Sources(transfer, scale, seed))
    seconds = time.perf_counter() - start
    for name, results in found.items():
        write_run(examination.name, scale, name, seed, {}, dict(results), [], seconds, _record(records, name, seed))


def _record(records: Path, name: str, seed: int) -> Path:
    return records / f"{name.replace(' ', '-')}-seed{seed}.json"
