"""The sentences: about what the studies have, and shown with the verdict of the rule."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from atbook.lab.findings import CLAIMS, cka_to_fine_tuned, shifted_accuracy, verdicts, verdicts_table
from atbook.lab.verdicts import TOO_SMALL, UNSEEN
from atbook.records import pack_bits
from tests.toy import recorded


def some_records(folder):
    """Records of Find after which two claims of chapter 3 hold."""
    rng = np.random.default_rng(0)
    shares = {"copy": 0.9, "fine-tune": 0.95, "scratch": 0.5, "scratch-2": 0.5, "scratch-3": 0.5}
    for method, share in shares.items():
        for seed in range(3):
            results = {"test_right": pack_bits(rng.random(4000) < share)}
            recorded(folder, "transfer", "find", method, seed, results)


def cells(table):
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()]


def test_all_verdicts_in_words(tmp_path):
    head, _, *rows = cells(verdicts_table(results=tmp_path))
    assert head == ["claim", "paper"], "nothing is recorded"
    assert [row[0] for row in rows] == [claim.sentence for claim in CLAIMS]
    some_records(tmp_path)
    head, _, *rows = cells(verdicts_table(results=tmp_path))
    assert head == ["claim", "paper", "Find"]
    one = verdicts_table("04", results=tmp_path).splitlines()
    assert len(one) == 2 + sum(claim.chapter == "04" for claim in CLAIMS)
    asked = sum("find" in claim.scales for claim in CLAIMS)
    found = Counter(row[2] for row in rows)
    assert found == {"holds": 2, "–": asked - 2, "": len(CLAIMS) - asked}


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
