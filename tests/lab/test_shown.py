"""What pages show of records: shares, and verdicts by the rule."""

from types import SimpleNamespace

import numpy as np
import pytest

from atbook.lab.findings import cka_to_fine_tuned, shifted_accuracy, verdicts
from atbook.lab.shown import kept_share
from atbook.lab.verdicts import TOO_SMALL, UNSEEN, Side
from atbook.records import pack_bits
from tests.toy import recorded
from tools.sentences import functions


def put(results, study, scale, method, seed, right, of=400):
    """A record whose student was right on the first `right` images."""
    recorded(results, study, scale, method, seed, {"test_right": pack_bits(np.arange(of) < right)})


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
    of_sentence = functions(tmp_path)["share"]("real-cifar10", "copy, blank image")
    assert of_sentence == pytest.approx(100 * share.value)


def test_a_share_across_studies_has_the_mean_of_three_scratch_students(tmp_path):
    for seed in range(3):
        put(tmp_path, "controls", "find", "copy, blank image", seed, 250 + seed)
        for method, right in zip(("copy", "scratch", "scratch-2", "scratch-3"), (300, 90, 100, 110 + seed)):
            put(tmp_path, "transfer", "find", method, seed, right)
    share = functions(tmp_path)["share"]
    scratch = 300 / 3 + 1 / 3  # of seeds 0, 1, 2, on the mean
    expected = 100 * (251 - scratch) / (300 - scratch)
    assert share("find", "copy, blank image", study="controls", other="transfer") == pytest.approx(expected)


def test_a_chapter_is_judged_among_all_claims():
    alone = verdicts("05")
    assert {answer.claim.chapter for answer in alone} == {"05"}
    assert alone == [answer for answer in verdicts() if answer.claim.chapter == "05"]


def test_no_undecided_claim_has_all_seeds_on_one_side():
    for answer in verdicts():
        if answer.verdict in (TOO_SMALL, UNSEEN):
            assert 0 < answer.seeds_for < answer.estimate.seeds, answer.claim.id


def test_what_is_measured_of_a_record():
    shifted = SimpleNamespace(results={"noise@1": 0.5, "blur@3": 0.7, "test_accuracy": 0.9})
    assert shifted_accuracy(shifted) == pytest.approx(0.6)
    compared = SimpleNamespace(results={"cka to fine-tune": [[0.2, 0.9], [0.9, 0.4]]})
    assert cka_to_fine_tuned(compared) == pytest.approx(0.3)
