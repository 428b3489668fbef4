"""The search among recipes: the same range for all, and it ends where no neighbour is better."""

import json
import math
from itertools import groupby, product
from pathlib import Path

import pytest

from atbook.lab.detection import DETECTION
from atbook.lab.real import REAL
from atbook.lab.real_full import REAL_FULL
from atbook.lab.searches import CLASSES, all_searches
from atbook.lab.studies import STUDIES
from atbook.lab.study import CENTRAL, Place, at_an_end
from atbook.lab.translation import TRANSLATION
from atbook.lab.tuning import Ladder, Range, to_try
from atbook.records import add_record, read_file, results_folder

RANGE = Range({"lr": (1, 2, 4, 8, 16), "weight_decay": (0.1, 0.3, 1.0)}, {"lr": 2, "weight_decay": 0.3}, {})


def searched(choices, score):
    scores = {}
    while waiting := to_try(choices, scores):
        assert not scores.keys() & set(waiting), "nothing is tried twice"
        scores |= {index: score(choices[index]) for index in waiting}
    return scores


@pytest.mark.parametrize("best", list(product(*RANGE.axes.values())))
def test_it_finds_the_top_of_a_hill(best):
    def score(recipe):
        return -sum(
            abs(RANGE.axes[name].index(recipe[name]) - RANGE.axes[name].index(value))
            for name, value in zip(RANGE.axes, best)
        )

    scores = searched(RANGE, score)
    assert tuple(RANGE[max(scores, key=scores.get)].values()) == best
    assert len(scores) < len(RANGE) == 15


def test_a_better_recipe_that_was_tried_elsewhere_is_where_the_search_goes_on():
    rates = Range({"lr": (1, 2, 4, 8, 16, 32, 64)}, {"lr": 2}, {}, step=0.0)
    scores = {0: 0.3, 1: 0.5, 2: 0.4}  # the top of a small hill
    assert (rates.open(scores), rates.best(scores)) == ([], 1)
    scores |= {4: 0.6}
    assert rates.open(scores) == [3, 5]
    scores |= {3: 0.55, 5: 0.2}
    assert (rates.open(scores), rates.best(scores)) == ([], 4)


@pytest.mark.parametrize("best", [2.0**k for k in range(-5, 9) if k != 1])
def test_a_ladder_goes_on_beyond_its_ends(best):
    ladder = Ladder("lr", (1.0, 4.0, 8.0))
    assert [recipe["lr"] for recipe in ladder[:3]] == [1.0, 4.0, 8.0] and len(ladder) == 19

    scores = searched(ladder, lambda recipe: -abs(math.log2(recipe["lr"] / best)))
    tried = [ladder[index]["lr"] for index in scores]
    assert ladder[max(scores, key=scores.get)]["lr"] == best
    assert {1.0, 4.0, 8.0} < set(tried) if not 1 < best < 8 else set(tried) == {1.0, 4.0, 8.0}
    assert min(tried) < best < max(tried)


# --- What was chosen, in the committed records


def test_every_search_has_ended():
    """No number of the book has a recipe from an end of what was tried."""
    waiting = {}
    for study in (CENTRAL, REAL, REAL_FULL, DETECTION, TRANSLATION, *STUDIES.values()):
        for path in sorted((results_folder() / study.name).glob("*.jsonl")):
            if names := at_an_end(study, Place(path.stem, None, results_folder(), Path())):
                waiting[study.name, path.stem] = names
    assert waiting == {}


def test_a_chosen_end_is_named(tmp_path):
    """Of the first three rates of `class-attention`'s records, 0.008 was best and the last."""
    place = Place("find", None, tmp_path, Path())
    path = place.records("class-attention")
    source = results_folder() / "class-attention" / "find.jsonl"
    for record in read_file(source):
        if record.trial is None or record.trial < 3:
            add_record(path, record)
    study = STUDIES["class-attention"]
    assert "cait, copy both" in at_an_end(study, place) and "cait, scratch" not in at_an_end(study, place)


# --- Every number of the book and its search: best rate, ends, and whether anything left guessing


READ_BY = "read by a token", "read by a token that starts even"
# Those in which nothing left guessing on 29 November 2026: the list can only become shorter, and a new search
# goes on until something learns.
KNOWN = {
    # over all 14 rates: without right places nothing of the tuning seed's maps is left in Match
    ("controls", "match"): {"copy, jigsaw"},
    ("linear", "find"): {"distilled maps, message twin"},  # over all 14 rates
    ("linear", "match"): {"distilled maps, message twin", "scratch"},  # likewise
    ("locality", "find"): {"local, scratch, 250 labels", "standard, scratch, 250 labels"},
    ("one-softmax", "match"): {"ResNet, attention", "ResNet, average"}
    | {"a query for each class", "attention", "average", "row distilled"},
    ("pointing", "find"): {"mark beside its glyph, scratch"},
    ("pretraining-methods-match", "match"): {"mae, copy", "mae, distill", "scratch"}
    | {f"{name}, fine-tune" for name in ("dino", "mae", "moco")},
    # fourteen trials, beyond both ends of what the method itself was searched over
    ("controls", "find"): {"distill, jigsaw", "distill, mean map"},
    ("sizes", "match"): {"width 48, scratch"},  # likewise
    ("static-routing", "find"): {"resmlp, read by a token"},
    ("static-routing", "match"): {"resmlp", "vit", "vit, even map copied", "resmlp, mean map distilled"}
    | {f"resmlp, {name}" for name in ("convolution", "depthwise convolution", *READ_BY)},
    ("transfer", "find"): {"copy-unrelated-twin"},
    ("transfer", "match"): {"copy-message-twin", "copy-unrelated-twin"},
    ("twins-by-depth", "match"): {"8 layers, scratch"},
}


def trials_of_files():
    """{(study, scale, method): [(accuracy, rate)]} of what is reported, read line by line."""
    trials, reported = {}, set()
    for path in results_folder().glob("*/*.jsonl"):
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            key = (path.parent.name, path.stem, record["method"])
            if record["kind"] == "run":
                reported.add(key)
            elif record["kind"] == "trial" and "validation_accuracy" in record["results"]:
                rate = record["config"]["recipe"]["lr"]
                trials.setdefault(key, []).append((record["results"]["validation_accuracy"], rate))
    return {key: of for key, of in trials.items() if key in reported and key[1] in CLASSES}


def test_every_search_has_its_best_rate_its_ends_and_whether_it_learned():
    listed = {(one.study, one.scale, one.method): one for one in all_searches()}
    expected = trials_of_files()
    assert listed.keys() == expected.keys() and len(listed) > 300
    for key, trials in expected.items():
        one, rates = listed[key], [rate for _, rate in trials]
        assert (one.best, one.rate) in trials and one.best == max(trials)[0], key
        assert (one.trials, one.low, one.high) == (len(trials), min(rates), max(rates)), key
        assert one.learned == (one.best > 1 / CLASSES[one.scale] + 0.03), key


def test_no_other_search_ended_where_nothing_left_guessing():
    unlearned = sorted((one.study, one.scale, one.method) for one in all_searches() if not one.learned)
    for place, some in groupby(unlearned, lambda one: one[:2]):
        assert {method for *_, method in some} <= KNOWN.get(place, set()), place
