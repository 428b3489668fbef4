"""What the book asks of its records: the sentences in `claims.toml`, each judged by the rule of
`atbook.lab.verdicts`."""

import tomllib
from pathlib import Path
from statistics import mean

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
    "real-cifar10-long": "CIFAR-10, all labels, 100 passes",
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


# --- The claims: a file, of which all that no record could show is checked ---


def read_claims(path: Path) -> tuple[Claim, ...]:
    """The claims of a TOML file. Raises `ValueError` naming the claim that is wrong."""
    claims: list[Claim] = []
    for entry in tomllib.loads(path.read_text(encoding="utf-8"))["claim"]:
        sides = {name: _side(**entry[name]) for name in ("higher", "lower")}
        places = {name: tuple(entry[name]) for name in ("scales", "exploratory", "primary") if name in entry}
        claim = Claim(**entry | sides | places)
        for scale in claim.scales:
            require_known(f"scale of the claim {claim.id}", scale, SCALES)
        for scale in (*claim.exploratory, *claim.primary):
            require_known(f"place of the claim {claim.id}", scale, claim.scales)
        if not claim.scales or any(claim.id == c.id or claim.sentence == c.sentence for c in claims):
            raise ValueError(f"{path.name}: the claim {claim.id} is asked nowhere, or stands there twice")
        claims.append(claim)
    return tuple(claims)


def _side(study: str, methods: list[str], metric: str | None = None) -> Side:
    if not isinstance(methods, list) or not methods:
        raise ValueError(f"methods must be a list of names, got {methods!r}")
    return Side(study, tuple(methods), METRICS[metric] if metric else None)


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
