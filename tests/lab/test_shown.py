"""What pages show of records: recipes as they were run, accuracies of both worlds, tables."""

from dataclasses import replace

import numpy as np
import pytest

from atbook.lab.detection import DETECTION
from atbook.lab.finer import FINER
from atbook.lab.real import REAL
from atbook.lab.real_full import REAL_FULL
from atbook.lab.shown import (
    FIGURES,
    accuracy_table,
    both_worlds,
    kept_share,
    percent,
    recorded_recipe,
    study_table,
    verdict_line,
)
from atbook.lab.studies import STUDIES
from atbook.lab.study import Study, Variant
from atbook.lab.study import scratch as from_scratch
from atbook.lab.verdicts import Estimate, Side
from atbook.records import add_record, pack_bits, records_file
from atlib.train.recipe import STUDENT, Recipe
from atrun.record import Record
from tools.sentences import functions

ABOUT = dict.fromkeys(("python", "torch", "timm", "atlib", "device", "threads", "commit", "date"), "")


def test_a_recipe_is_the_one_that_was_described():
    recipe = Recipe(steps=7, betas=(0.8, 0.99), layer_decay=0.75, mixup=0.5)
    assert Recipe.described(recipe.describe()) == recipe
    assert Recipe.described(recipe.describe() | {"plan": {"what": "map"}, "stop_at": 3}) == recipe
    assert Recipe.described({"lr": 0.5}) == Recipe(lr=0.5), "a record from before a field has its default"


def test_a_recorded_recipe_with_changes():
    """Of the committed records."""
    recipe = recorded_recipe("match", "copy")
    assert recipe.steps == 500 and recipe.batch_size == STUDENT.batch_size
    assert recorded_recipe("match", "copy", steps=5) == Recipe.described(recipe.describe() | {"steps": 5})
    with pytest.raises(ValueError, match="'copi'.*'copy'"):
        recorded_recipe("match", "copi")


def test_scratch_is_the_mean_of_three_first_weights(tmp_path):
    for method, right in (("scratch", 10), ("scratch-2", 20), ("scratch-3", 60), ("copy", 90)):
        for seed in range(2):
            results = {"test_right": pack_bits(np.arange(100) < right)}
            record = Record("transfer", method, seed, {}, results, [], 1.0, 1.0, ABOUT)
            add_record(records_file("transfer", "find", tmp_path), record)
    worlds = both_worlds(tmp_path)
    assert list(worlds) == ["Find", "Match"] and worlds["Match"] == {}
    assert worlds["Find"]["scratch"].mean == pytest.approx(0.3) and worlds["Find"]["copy"].mean == 0.9
    rows = accuracy_table(worlds, {"scratch": "nothing"}).splitlines()
    assert rows[0] == "| method | what the student gets | Find | Match |"
    assert rows[2].startswith("| `scratch` | nothing | 30.0 [") and rows[2].endswith("] | – |")


def test_an_accuracy_in_words():
    assert percent(Estimate(0.82, 0.8, 0.84, 0.0, 5, 4000)) == "82.0 [80.0, 84.0]"
    assert percent(Estimate(0.43, -0.07, 0.93, 0.0, 5, 4000)) == "43.0 [−7.0, 93.0]"
    assert percent(None) == "–"


def put(results, study, scale, method, seed, right, of=400):
    """A record whose student was right on the first `right` images."""
    measured = {"test_right": pack_bits(np.arange(of) < right)}
    record = Record(study, method, seed, {}, measured, [], 1.0, 1.0, ABOUT)
    add_record(records_file(study, scale, results), record)


def test_a_share_is_that_of_the_seeds_that_all_have(tmp_path):
    sides = [Side("real", (name,)) for name in ("copy, blank image", "copy", "scratch")]
    assert kept_share("real-cifar10", *sides, results=tmp_path) is None
    for seed, (blank, copy, scratch) in enumerate([(180, 210, 100), (190, 205, 105), (200, 220, 110)]):
        for side, right in zip(sides, (blank, copy, scratch)):
            put(tmp_path, "real", "real-cifar10", side.methods[0], seed, right)
    put(tmp_path, "real", "real-cifar10", "copy", 7, 400)  # alone in its seed
    share = kept_share("real-cifar10", *sides, results=tmp_path)
    assert share.value == pytest.approx((80 + 85 + 90) / (110 + 100 + 110))
    assert share.low < share.value < share.high
    assert functions(tmp_path)["share"]("real-cifar10", "copy, blank image") == pytest.approx(
        100 * share.value
    )


def test_a_share_across_studies_has_the_mean_of_three_scratch_students(tmp_path):
    for seed in range(3):
        put(tmp_path, "blank", "find", "copy, blank image", seed, 250 + seed)
        for method, right in zip(("copy", "scratch", "scratch-2", "scratch-3"), (300, 90, 100, 110 + seed)):
            put(tmp_path, "transfer", "find", method, seed, right)
    share = functions(tmp_path)["share"]
    scratch = 300 / 3 + 1 / 3  # of seeds 0, 1, 2, on the mean
    expected = 100 * (251 - scratch) / (300 - scratch)
    assert share("find", "copy, blank image", study="blank", other="transfer") == pytest.approx(expected)


def test_a_verdict_in_a_line(tmp_path):
    claim = "published-copy-beats-scratch"
    line = verdict_line(claim, "real-cifar10", results=tmp_path)
    assert line.endswith("**not recorded** (CIFAR-10, published teacher).")
    for seed in range(4):
        put(tmp_path, "real", "real-cifar10", "copy", seed, 300 + seed % 2)
        put(tmp_path, "real", "real-cifar10", "scratch", seed, 100)
    line = verdict_line(claim, results=tmp_path)
    assert "**holds** (CIFAR-10, published teacher; in 4 of 4 seeds, +50.1 points," in line and "PACS" in line
    put(tmp_path, "real", "real-cifar10", "copy", 0, 40)
    put(tmp_path, "real", "real-cifar10", "copy", 1, 60)
    assert "**cannot be seen with 4 seeds**" in verdict_line(claim, "real-cifar10", results=tmp_path)
    with pytest.raises(ValueError, match="'published-copi'.*'published-copy-beats-scratch'"):
        verdict_line("published-copi")
    with pytest.raises(ValueError, match="'find'.*'real-pacs'"):
        verdict_line(claim, "find")


def test_a_study_shows_its_own_figure_and_one_of_two_figures_both(tmp_path):
    ranked = Variant("ranked", from_scratch, None, trials=({},), measure=FINER)
    named = Variant("named", from_scratch, None, trials=({}, {"lr": 1e-3}))
    study = Study("both", "", "", (ranked, named))
    for seed, value in enumerate((0.25, 0.35)):
        for method, results in (
            ("ranked", {"test_map": value, "test_knn": 0.9}),
            ("named", {"test_accuracy": 0.8}),
        ):
            record = Record("both", method, seed, {}, results, [], 1.0, 1.0, ABOUT)
            add_record(records_file("both", "find", tmp_path), record)
    assert study_table(study, "find", tmp_path).splitlines() == [
        "| variant | test accuracy | mean average precision | seeds |",
        "| --- | --- | --- | --- |",
        "| named ‡ | 80.0 ± 0.0 |  | 2 |",
        "| ranked |  | 30.0 ± 7.1 | 2 |",
    ]
    alone = study_table(replace(study, variants=(ranked,), name="alone"), "find", tmp_path)
    assert alone.splitlines()[0] == "| variant | seeds |", "nothing is recorded"


def test_every_figure_that_a_study_is_shown_by_has_a_name():
    studies = (*STUDIES.values(), DETECTION, REAL, REAL_FULL)
    assert {variant.measure.figure for study in studies for variant in study.variants} <= FIGURES.keys()
