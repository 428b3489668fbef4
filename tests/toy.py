"""The central experiment at toy size: a few steps, images and recipes; everything else is the real thing."""

from dataclasses import dataclass, replace

import pytest

from atbook.lab import study as experiment
from atbook.lab.scales import CENTRAL_METHODS, TUNING_SEED, GlyphScale
from atbook.lab.study import Place, Sources, fine_tuning
from atbook.lab.tuning import grid
from atbook.records import add_record, records_file
from atbook.worlds import glyphs, pretext
from atlib.checkpoint import save_vit, write_tensors
from atlib.recipe import Recipe
from atlib.vit import Architecture
from atrun.record import Record
from tests.helpers import randomise

SPLITS = []  # what was asked for, in order


@dataclass(frozen=True)
class ToyScale(GlyphScale):
    def held_out(self, split, twin=None):
        SPLITS.append(split)
        return self._images(split, 40, 0, twin)


TRIALS = grid(lr=(1e-3, 1e-2))
SMALL = {"steps": 2, "batch_size": 8}
RECIPES = replace(pretext.RETRIEVAL, **SMALL), Recipe(**SMALL)
TUNED = {method: TRIALS for method in CENTRAL_METHODS}
TOY = ToyScale("toy", Architecture("glyphs"), CENTRAL_METHODS, *RECIPES, TUNED, labels=16, unlabelled=16)


def known(data=None):
    """What `scales` is replaced by."""
    return {"toy": TOY}


def place(folder):
    return Place("toy", None, folder / "results", folder / "work")


def few_held_out(monkeypatch):
    """40 validation images for what a teacher has left unlearned: 2,000 would take longer than all else."""
    plain = glyphs.generate

    def generate(split, size, *more, **options):
        return plain(split, min(size, 40) if split == "validation" else size, *more, **options)

    monkeypatch.setattr(glyphs, "generate", generate)


def recorded(folder, study, scale, method, seed, results, *kind_and_trial):
    """Add a record of these results, as if they had been measured, to a folder of records."""
    about = dict.fromkeys(("python", "torch", "timm", "atlib", "device", "threads", "commit", "date"), "")
    record = Record(study, method, seed, {}, results, [], 1.0, 1.0, about, *kind_and_trial)
    add_record(records_file(study, scale, folder), record)


def untrained_models(place, schoolings=()):
    """Fresh weights wherever a study looks for a teacher of seed 0."""
    teachers = {place.teacher(seed): {"num_classes": 192} for seed in (0, TUNING_SEED)}
    for schooling in schoolings:
        teachers[place.teacher(0, schooling)] = {**schooling.model, "num_classes": schooling.outputs}
    for index, (path, model) in enumerate(teachers.items()):
        architecture = Architecture("glyphs", model)
        save_vit(path, randomise(architecture.build(), index), architecture)
    fine_tuned = randomise(Architecture("glyphs").build(), len(teachers))
    write_tensors(fine_tuning(place, 0).weights, fine_tuned.state_dict(), {})


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """What variants are built from at seed 0, with fresh weights in the place of teachers."""
    monkeypatch.setattr(experiment, "scales", known)
    folder = place(tmp_path)
    untrained_models(folder)
    return Sources(folder, TOY, 0)


def forbid_training(monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError("something was trained")

    monkeypatch.setattr(experiment, "train", refuse)
    monkeypatch.setattr("atbook.lab.scales.train", refuse)


def files(folder):
    """{relative path: (time of change, content)} of everything below a folder."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file()
    }
