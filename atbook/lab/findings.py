"""What the book asks of its records: the sentences in `claims.toml`, each judged by the rule of
`atbook.lab.verdicts`."""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any

from atbook.lab.verdicts import NOT_RECORDED, Claim, Judged, Metric, Side, judge, on_test
from atbook.records import markdown_table
from atlib._util import require_known
from atrun.record import Record

# Where a claim is asked, and the head of its column.
SCALES = {
    "find": "Find",
    "match": "Match",
    "cifar10-cpu": "CIFAR-10",
    "pacs": "PACS",
    "mosaics": "Find, photographs",
    "scenes": "Scenes",
    "phrases": "Phrases",
    "real-cifar10": "CIFAR-10, published teacher",
    "real-pacs": "PACS, published teacher",
    "real-cifar10-98px": "CIFAR-10, 98 pixels",
    "real-cifar10-full": "CIFAR-10, all labels",
}
SCRATCH = ("scratch", "scratch-2", "scratch-3")  # first weights matter, so that a seed has three


# --- What is measured of a record where it is not the accuracy on plain test images ---


def shifted_accuracy(record: Record) -> float:
    """Mean accuracy over all shifted sets, those named like "noise@3"."""
    return mean(value for name, value in record.results.items() if "@" in name)


def cka_to_fine_tuned(record: Record) -> float:
    """CKA with the same layer of the fine-tuned model, mean over layers."""
    table = record.results["cka to fine-tune"]
    return mean(table[layer][layer] for layer in range(len(table)))


def with_fine_tuned(record: Record) -> float:
    """Accuracy of the mean of this model's and the fine-tuned model's probabilities."""
    return record.results["ensemble"]["fine-tune"]


def plain_accuracy(record: Record) -> float:
    """Accuracy on the test images."""
    return record.results["test_accuracy"]


# As the claims name it.
METRICS: dict[str, Metric] = {
    "accuracy": plain_accuracy,
    "accuracy under shifts": shifted_accuracy,
    "accuracy with fine-tune": with_fine_tuned,
    "CKA with fine-tune": cka_to_fine_tuned,
    "ap": on_test("ap"),
    "mask_ap": on_test("mask_ap"),
    "entropy of maps": on_test("map_entropy"),
    "entropy of the teacher's maps": on_test("teacher_map_entropy"),
    "map": on_test("map"),  # mean average precision, of shapes that labels did not tell apart
}


# --- The claims: a file, of which every field is checked ---

# The types of fields, and of those that may be left out.
_SIDE, _OF_SIDE = {"study": str, "methods": list}, {"metric": str}
_CLAIM = {"id": str, "chapter": str, "sentence": str, "higher": dict, "lower": dict, "scales": list}
_OF_CLAIM = {"paper": str, "margin": float, "factor": int, "exploratory": list, "primary": list}


def read_claims(path: Path) -> tuple[Claim, ...]:
    """The claims of a TOML file. Raises `ValueError` naming the claim and the field that is wrong."""
    claims = []
    for number, entry in enumerate(tomllib.loads(path.read_text(encoding="utf-8"))["claim"], start=1):
        where = f"{path.name}, claim {number}"
        _require_fields(where, entry, _CLAIM, _OF_CLAIM)
        if not re.fullmatch("[a-z0-9]+(-[a-z0-9]+)*", entry["id"]):
            raise ValueError(f"{where}: id must be of small letters, digits and hyphens, got {entry['id']!r}")
        if not entry["scales"]:
            raise ValueError(f"{where}: scales are none")
        for scale in entry["scales"]:
            require_known(f"scale ({where})", scale, SCALES)
        for name in ("exploratory", "primary"):
            for scale in entry.get(name, ()):
                require_known(f"{name} ({where})", scale, entry["scales"])
        for name in ("id", "sentence"):
            if entry[name] in (getattr(claim, name) for claim in claims):
                raise ValueError(f"{where}: its {name} is also that of another claim")
        sides = {name: _side(f"{where}, {name}", entry[name]) for name in ("higher", "lower")}
        places = {name: tuple(entry[name]) for name in ("scales", "exploratory", "primary") if name in entry}
        claims.append(Claim(**entry | sides | places))
    return tuple(claims)


def _side(where: str, entry: Mapping[str, Any]) -> Side:
    _require_fields(where, entry, _SIDE, _OF_SIDE)
    if not entry["methods"] or not all(isinstance(method, str) for method in entry["methods"]):
        raise ValueError(f"{where}: methods must be names, got {entry['methods']}")
    if "metric" not in entry:
        return Side(entry["study"], tuple(entry["methods"]))
    require_known(f"metric ({where})", entry["metric"], METRICS)
    return Side(entry["study"], tuple(entry["methods"]), METRICS[entry["metric"]])


def _require_fields(where: str, entry: Mapping, needed: Mapping[str, type], may: Mapping[str, type]) -> None:
    for name in needed:
        if name not in entry:
            raise ValueError(f"{where}: {name} is missing")
    for name, value in entry.items():
        require_known(f"field ({where})", name, needed | may)
        if type(value) is not (needed | may)[name]:
            raise ValueError(
                f"{where}: {name} must be of type {(needed | may)[name].__name__}, got {value!r}"
            )


CLAIMS = read_claims(Path(__file__).with_name("claims.toml"))


# --- The claims with their verdicts, as a table ---


def verdicts(*chapters: str, results: Path | None = None) -> list[Judged]:
    """The claims of some chapters ("05"), of all when none is named, each judged among all claims.

    results: the folder of the records, by default the book's. Raises `ValueError` for a chapter without
    claims.
    """
    for chapter in chapters:
        require_known("chapter with claims", chapter, sorted({claim.chapter for claim in CLAIMS}))
    return [answer for answer in judge(CLAIMS, results) if not chapters or answer.claim.chapter in chapters]


def findings_table(*chapters: str, primary: bool | None = None, results: Path | None = None) -> str:
    """The claims of some chapters ("05"), of all when none is named, as a Markdown table, a row for each
    place where they are asked: verdict, difference with its interval, seeds on the claim's side, adjusted p.

    primary: True or False for the primary or the secondary ones alone. results: the folder of the records, by
    default the book's. Raises `ValueError` for a chapter without claims.
    """
    judged = verdicts(*chapters, results=results)
    shown = [answer for answer in judged if primary in (None, answer.primary)]
    quoted = any(answer.claim.paper for answer in shown)  # a column of dashes would make the others narrow
    rows = [
        [
            answer.claim.sentence,
            *([answer.claim.paper or "–"] if quoted else ()),
            SCALES[answer.scale],
            *_measured(answer),
        ]
        for answer in shown
    ]
    adjusted = {None: "adjusted p or q", True: "adjusted p", False: "q"}[primary]
    head = ["claim", *(["paper"] if quoted else ()), "asked in"]
    return markdown_table([*head, "verdict", "difference [interval]", f"seeds for it; {adjusted}"], *rows)


def verdicts_table(*chapters: str, results: Path | None = None) -> str:
    """The verdicts alone, one line a claim, a column for each place where any is recorded; a dash where fewer
    than three seeds are. Arguments and errors are those of `findings_table`."""
    judged = verdicts(*chapters, results=results)
    recorded = {answer.scale for answer in judged if answer.verdict != NOT_RECORDED}
    scales = [scale for scale in SCALES if scale in recorded]
    cells = {(answer.claim, answer.scale): verdict_with_mark(answer) for answer in judged}
    claims = dict.fromkeys(answer.claim for answer in judged)
    quoted = any(claim.paper for claim in claims)
    rows = [
        [
            claim.sentence,
            *([claim.paper or "–"] if quoted else ()),
            *(cells.get((claim, scale), "") for scale in scales),
        ]
        for claim in claims
    ]
    head = ["claim", *(["paper"] if quoted else ()), *(SCALES[scale] for scale in scales)]
    return markdown_table(head, *rows)


def verdict_with_mark(judged: Judged) -> str:
    """ "holds", or "holds †" of an exploratory claim; a dash where it is not recorded."""
    if judged.verdict == NOT_RECORDED:
        return "–"
    return judged.words + (" †" if judged.scale in judged.claim.exploratory else "")


def _measured(judged: Judged) -> list[str]:
    """["**holds**", "+14.2 [12.1, 16.3]", "5 of 5; 0.004"]; dashes where it is not recorded."""
    if judged.estimate is None:
        return [NOT_RECORDED, "–", "–"]
    factor = judged.claim.factor
    digits = 1 if factor == 100 else 2
    difference, low, high = (f"{factor * value:+.{digits}f}" for value in judged.estimate[:3])
    return [
        f"**{judged.verdict}{' †' if judged.scale in judged.claim.exploratory else ''}**",  # seeds follow
        f"{difference} [{low}, {high}]".replace("-", "−"),
        f"{judged.seeds_for} of {judged.estimate.seeds}; "
        + ("< 0.001" if judged.adjusted < 0.001 else f"{judged.adjusted:.3f}"),
    ]
