"""Every number of the book and its search: best rate, ends, and whether anything left guessing."""

import json
from itertools import groupby

from atbook.lab.searches import CLASSES, all_searches
from atbook.records import results_folder

# In how many nothing left guessing on 29 November 2026, by study and scale: the numbers can only become
# smaller, and a new search goes on until something learns.
KNOWN = {
    ("controls", "find"): 2, ("controls", "match"): 1, ("linear", "find"): 1, ("linear", "match"): 2,
    ("locality", "find"): 2, ("one-softmax", "match"): 5, ("pointing", "find"): 1,
    ("pretraining-methods-match", "match"): 6, ("static-routing", "find"): 1, ("static-routing", "match"): 8,
    ("transfer", "find"): 1, ("transfer", "match"): 2, ("twins-by-depth", "match"): 1,
}  # fmt: skip


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
        assert len(methods := [*some]) <= KNOWN.get(place, 0), methods
