"""Every number of the book and its search: best rate, ends, and whether anything left guessing."""

import json
from itertools import groupby

from atbook.lab.searches import CLASSES, all_searches
from atbook.records import results_folder

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
