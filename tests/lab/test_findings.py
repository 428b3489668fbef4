"""The sentences: about what the studies have, and shown with the verdict of the rule."""

from types import SimpleNamespace

import pytest

from atbook.lab.findings import cka_to_fine_tuned, shifted_accuracy, verdicts
from atbook.lab.verdicts import TOO_SMALL, UNSEEN


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
