"""What pages show of records: recipes as they were run, accuracies of both worlds, tables."""

import numpy as np
import pytest

from atbook.lab.shown import accuracy_table, both_worlds, percent, recorded_recipe
from atbook.lab.verdicts import Estimate
from atbook.records import add_record, pack_bits, records_file
from atlib.train.recipe import STUDENT, Recipe
from atlib.train.record import Record

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
