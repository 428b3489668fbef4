"""What students share, image by image: against loops over pairs of seeds, and the labels against others."""

import numpy as np
import pytest

from atbook.lab.overlaps import overlap, partners_of, right_by_partner, right_where
from atbook.records import read_records, unpack_bits
from tools.sentences import functions

BLANK = "copy, blank image"


def bits(study, scale, method):
    records = read_records(study, scale)
    return {r.seed: unpack_bits(r.results["test_right"]).tolist() for r in records if r.method == method}


def by_loops(of, only, but):
    """The mean over seeds, image by image and pair by pair."""
    shares = []
    for seed in of:
        right = asked = 0
        for first in only:
            for second in but:
                if seed not in (first, second):
                    for mine, a, b in zip(of[seed], only[first], but[second]):
                        if a and not b:
                            asked, right = asked + 1, right + mine
        shares.append(right / asked)
    return np.mean(shares)


@pytest.mark.parametrize(
    "scale, methods, studies",
    [
        ("real-pacs", ("copy", BLANK, "scratch"), ("real",)),
        ("match", ("copy", "copy-routing-twin", BLANK), ("transfer", "transfer", "controls")),
    ],
)
def test_shares_are_those_of_a_loop_over_pairs(scale, methods, studies):
    all_three = studies * 3 if len(studies) == 1 else studies
    of, only, but = (bits(study, scale, method) for study, method in zip(all_three, methods))
    some = {seed: of[seed] for seed in (0, 1)}
    found = right_where(*({s: np.array(b) * 1.0 for s, b in side.items()} for side in (some, only, but)))
    assert found.mean == pytest.approx(by_loops(some, only, but))
    assert found.low < found.mean < found.high
    assert functions()["overlap"](scale, *methods, *studies) == 100 * overlap(scale, *methods, *studies).mean


def test_a_partners_map_that_is_read_rightly():
    partners = partners_of("real-cifar10")
    of, blind = (bits("real", "real-cifar10", method) for method in ("copy, same class", BLANK))
    for read in (True, False):
        shares = []
        for seed, right in of.items():
            chosen = [
                right[place]
                for other, theirs in blind.items()
                if other != seed
                for place, partner in enumerate(partners)
                if theirs[partner] == read
            ]
            shares.append(np.mean(chosen))
        found = right_by_partner("real-cifar10", read, "copy, same class", BLANK, "real")
        assert found.mean == pytest.approx(np.mean(shares))
