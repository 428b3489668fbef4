"""The sentences: about what the studies have, and shown with the verdict of the rule."""

import re
from collections import Counter

import numpy as np
import pytest

from atbook.lab.detection import DETECTION
from atbook.lab.evals import COMPARISON, EXAMINATIONS
from atbook.lab.findings import (
    CLAIMS,
    METRICS,
    cka_to_fine_tuned,
    findings_table,
    read_claims,
    shifted_accuracy,
    verdicts,
    verdicts_table,
)
from atbook.lab.real import REAL
from atbook.lab.real_full import REAL_FULL
from atbook.lab.scales import scales
from atbook.lab.studies import CENTRAL, STUDIES
from atbook.lab.translation import TRANSLATION
from atbook.lab.verdicts import TOO_SMALL, UNSEEN, Claim, Side
from atbook.records import add_record, pack_bits, records_file
from atrun.record import Record

ABOUT = dict.fromkeys(("python", "torch", "timm", "atlib", "device", "threads", "commit", "date"), "")


def known(study, scale):
    """The methods that a study or an examination has at a scale."""
    if study == CENTRAL.name:
        return scales()[scale].methods
    if study in EXAMINATIONS:
        return EXAMINATIONS[study].methods
    studies = STUDIES | {one.name: one for one in (DETECTION, REAL, REAL_FULL, TRANSLATION)}
    return tuple(variant.name for variant in studies[study].variants)


def record(study, method, seed, results, scale="find"):
    return Record(study, method, seed, {}, results, [], 1.0, 1.0, ABOUT), scale


def write(folder, *records):
    for record, scale in records:
        add_record(records_file(record.experiment, scale, folder), record)


def test_they_are_about_what_is_run():
    for claim in CLAIMS:
        for scale in claim.scales:
            for side in (claim.higher, claim.lower):
                assert set(side.methods) <= set(known(side.study, scale)), claim.sentence


GOOD = """
[[claim]]
id = "one-beats-two"
chapter = "04"
sentence = "one"
higher = { study = "transfer", methods = ["copy"] }
lower = { study = "detection", methods = ["fcos, copy"], metric = "ap" }
scales = ["find"]
margin = 0.01
"""


def test_a_claim_is_read_from_its_file(tmp_path):
    path = tmp_path / "claims.toml"
    path.write_text(GOOD)
    lower = Side("detection", ("fcos, copy",), METRICS["ap"])
    higher = Side("transfer", ("copy",))
    claim = Claim("one-beats-two", "04", "one", higher, lower, ("find",), "", 0.01)
    assert read_claims(path) == (claim,)


@pytest.mark.parametrize(
    "old, new, named",
    [
        ('chapter = "04"', "", "claim 1: chapter is missing"),
        ('chapter = "04"', "chapter = 4", "claim 1: chapter must be of type str, got 4"),
        ("margin", "margins", "field .claims.toml, claim 1. 'margins'.*'margin'"),
        ("0.01", "1", "margin must be of type float, got 1"),
        ('"find"', '"fund"', "scale .claims.toml, claim 1. 'fund'.*'find'"),
        ('["find"]', "[]", "claim 1: scales are none"),
        ("margin", 'exploratory = ["match"]\nmargin', "exploratory .claims.toml, claim 1. 'match'.*'find'"),
        ('methods = ["copy"]', "methods = []", "claim 1, higher: methods must be names"),
        ('metric = "ap"', 'metric = "app"', "metric .claims.toml, claim 1, lower. 'app'.*'ap'"),
        ('study = "transfer", ', "", "claim 1, higher: study is missing"),
        (GOOD, GOOD + GOOD, "claim 2: its id is also that of another claim"),
        (
            GOOD,
            GOOD + GOOD.replace("one-beats-two", "other"),
            "claim 2: its sentence is also that of another",
        ),
        ("one-beats-two", "One beats two", "claim 1: id must be .* got 'One beats two'"),
    ],
)
def test_what_is_wrong_with_a_claim_is_named(tmp_path, old, new, named):
    path = tmp_path / "claims.toml"
    path.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(ValueError, match=named):
        read_claims(path)


def rng_records(folder):
    """Records of Find after which two claims of chapter 04 hold; returns how many."""
    rng = np.random.default_rng(0)
    shares = {"copy": 0.9, "fine-tune": 0.95, "scratch": 0.5, "scratch-2": 0.5, "scratch-3": 0.5}
    write(
        folder,
        *(
            record("transfer", method, seed, {"test_right": pack_bits(rng.random(4000) < share)})
            for method, share in shares.items()
            for seed in range(3)
        ),
    )
    return 2


def cells(table):
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()]


def test_the_table_has_a_row_for_each_place(tmp_path):
    rng_records(tmp_path)
    head, _, *rows = cells(findings_table("04", results=tmp_path))
    assert head[:3] == ["claim", "paper", "asked in"] and head[-1] == "seeds for it; adjusted p or q"
    assert len(rows) == sum(len(claim.scales) for claim in CLAIMS if claim.chapter == "04")
    assert [row[2] for row in rows[:4]] == ["Find", "Match", "CIFAR-10", "PACS"]
    assert rows[0][3] == "**holds**" and rows[0][1] == "85.1 against 83.0"
    assert re.fullmatch(r"\+(39|40)\.\d \[\+3\d\.\d, \+4\d\.\d\]", rows[0][4])
    assert rows[0][5].startswith("3 of 3; 0.")
    assert rows[1][3:] == ["not recorded", "–", "–"]
    assert Counter(row[3] for row in rows)["**holds**"] == 2


def test_primary_and_secondary_claims_part_the_table(tmp_path):
    rng_records(tmp_path)
    whole = findings_table("04", results=tmp_path).splitlines()[2:]
    parts = [findings_table("04", primary=p, results=tmp_path).splitlines()[2:] for p in (True, False)]
    assert sorted(whole) == sorted(parts[0] + parts[1]) and len(parts[0]) == 2
    assert all("| A student with copied maps beats one from scratch |" in row for row in parts[0])


def test_all_verdicts_in_words(tmp_path):
    head, _, *rows = cells(verdicts_table(results=tmp_path))
    assert head == ["claim", "paper"], "nothing is recorded"
    assert [row[0] for row in rows] == [claim.sentence for claim in CLAIMS]
    some = rng_records(tmp_path)
    head, _, *rows = cells(verdicts_table(results=tmp_path))
    assert head == ["claim", "paper", "Find"]
    one = verdicts_table("04", results=tmp_path).splitlines()
    assert len(one) == 2 + sum(claim.chapter == "04" for claim in CLAIMS)
    asked = sum("find" in claim.scales for claim in CLAIMS)
    found = Counter(row[2] for row in rows)
    assert found == {"holds": some, "–": asked - some, "": len(CLAIMS) - asked}


def test_a_chapter_without_claims_is_refused():
    with pytest.raises(ValueError, match="'01'"):
        findings_table("01")


def test_a_chapter_is_judged_among_all_claims():
    alone = verdicts("05")
    assert {answer.claim.chapter for answer in alone} == {"05"}
    assert alone == [answer for answer in verdicts() if answer.claim.chapter == "05"]


# Named on 28 November 2026, before the records of `controls` and of jigsaws: none is added or taken away.
PRIMARY = {
    ("copy-beats-scratch", "find"),
    ("copy-beats-scratch", "match"),
    ("distill-beats-scratch", "match"),
    ("routing-is-enough", "match"),
    ("published-copy-beats-scratch", "real-cifar10"),
    ("published-distill-beats-scratch", "real-cifar10"),
    ("routing-beats-message", "match"),
    ("jigsaw-loses-nine-tenths", "match"),
    ("jigsaw-keeps-four-fifths", "real-cifar10"),
    ("distill-needs-right-places-on-photographs", "real-cifar10"),
    ("oracle-is-enough", "match"),
    ("answers-reach-copy", "find"),
}


def test_the_primary_claims_are_the_twelve_that_were_named():
    assert {(claim.id, scale) for claim in CLAIMS for scale in claim.primary} == PRIMARY
    late = {(claim.id, scale) for claim in CLAIMS for scale in claim.exploratory}
    assert not PRIMARY & late, "none was written after its records"


def test_no_undecided_claim_has_all_seeds_on_one_side():
    for answer in verdicts():
        if answer.verdict in (TOO_SMALL, UNSEEN):
            assert 0 < answer.seeds_for < answer.estimate.seeds, answer.claim.id


def test_claims_written_after_their_records_are_shown_as_such(tmp_path):
    """These were added with their records in view; the list can only become longer by such a claim."""
    late = {(claim.chapter, scale) for claim in CLAIMS for scale in claim.exploratory}
    assert ("F1", "find") in late and ("F4", "match") in late and ("04", "find") not in late
    rng = np.random.default_rng(0)
    for seed in range(3):
        for study, method, share in (("transfer", "copy", 0.9), ("transfer", "scratch", 0.5)):
            write(tmp_path, record(study, method, seed, {"test_right": pack_bits(rng.random(4000) < share)}))
        for labels in ("scratch, 32000 labels", "copy, 32000 labels"):
            share = {"test_right": pack_bits(rng.random(4000) < 0.5)}
            write(tmp_path, record("labels", labels, seed, share))
    table = verdicts_table("F4", results=tmp_path)
    assert " † |" in table


def test_what_is_measured_of_a_record():
    shifted, _ = record("shifts", "copy", 0, {"noise@1": 0.5, "blur@3": 0.7, "test_accuracy": 0.9})
    assert shifted_accuracy(shifted) == pytest.approx(0.6)
    compared, _ = record(COMPARISON.name, "copy", 0, {"cka to fine-tune": [[0.2, 0.9], [0.9, 0.4]]})
    assert cka_to_fine_tuned(compared) == pytest.approx(0.3)
