"""The papers' claims beside what this book's records say about them, as a table."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from atlib._util import require_known
from atlib.lab.evidence import (
    CKA,
    NATS,
    NOT_TESTED,
    Comparison,
    Evidence,
    accuracy,
    beyond_expectation,
    cka_to_fine_tuned,
    disagreement_with,
    divergence_from_teacher,
    ensemble_with,
    higher,
    lower,
    made_of,
    mean_shifted_accuracy,
    no_better,
    no_worse,
    of,
    other_domains,
    together,
)
from atlib.lab.studies import COMPONENTS
from atlib.record import results_folder

# --- The claims of both papers, chapter by chapter, and which records speak for or against each ---

NOTEBOOKS = {
    name[:2]: name
    for name in (
        "05-attention-copy",
        "06-attention-distillation",
        "07-q-transfer",
        "08-which-layers-which-heads",
        "09-what-in-a-map-matters",
        "10-is-it-just-distillation",
        "11-different-teacher-different-student",
        "13-same-features",
        "14-same-mistakes",
        "15-reading-maps",
        "16-out-of-distribution",
        "17-when-are-features-needed",
        "18-when-it-fails",
        "19-model-size",
    )
}
# Scales with real images; a new one needs no more than its line here.
REAL = {"pacs": "PACS", "cifar10-cpu": "CIFAR-10, weak teacher", "cifar10": "CIFAR-10"}
NOT_QUOTED = "–"


class Claim(NamedTuple):
    """chapter: a key of `NOTEBOOKS`; says: the claim; paper: its figures and where they stand; built_in,
    real: the results folder -> evidence."""

    chapter: str
    says: str
    paper: str
    built_in: Callable[[Path], Evidence]
    real: Callable[[Path], Evidence]


def _evidence(comparisons: Sequence[Comparison], scale: str, results: Path) -> Evidence:
    return together([comparison.evidence(results, scale) for comparison in comparisons])


def _on_real_images(choices: Sequence[Sequence[Comparison]], results: Path) -> Evidence:
    """What the real scales that have been run say, all of them together; `choices`: comparisons of which each
    scale has one or the other."""
    found = [
        (title, _evidence(comparisons, scale, results))
        for scale, title in REAL.items()
        for comparisons in choices
    ]
    tested = [
        Evidence(f"{title}: {each.figures}", each.verdict)
        for title, each in found
        if each.verdict != NOT_TESTED
    ]
    return together(tested) if tested else Evidence("no run", NOT_TESTED)


def _claim(
    chapter: str,
    says: str,
    paper: str,
    *comparisons: Comparison,
    real: Sequence[Sequence[Comparison]] | None = None,
) -> Claim:
    return Claim(
        chapter,
        says,
        paper,
        partial(_evidence, comparisons, "built-in"),
        partial(_on_real_images, real or [comparisons]),
    )


_central, _family, _averages, _layers, _pairs = (
    partial(of, study) for study in ("transfer", "family", "averages", "layers", "pairs")
)
_pretraining, _long_tail, _components, _sizes = (
    partial(of, study) for study in ("pretraining", "long-tail", "components", "sizes")
)
_COPIED = {"copy": "copied", "distill": "distilled"}
_BOTH = tuple(_COPIED)


def _compared(method, metric, name=None, study="comparison"):
    return of(study, method, metric, name)


# The same measurements on the students of the central experiment, which are those that real images have.
_photographed = partial(_compared, study="central-comparison")


def _midway(study):
    return made_of(
        "midway from scratch to fine-tune", lambda *ends: sum(ends) / 2, study("scratch"), study("fine-tune")
    )


def _better_of_two(method, compared=_compared):
    return made_of("the better of the two", max, compared(method, accuracy), compared("fine-tune", accuracy))


def _ensemble_gain(compared):
    return [
        higher(
            compared(how, ensemble_with("fine-tune"), f"{how} with fine-tune"), _better_of_two(how, compared)
        )
        for how in _BOTH
    ]


def _on_shifted_images(compare, other):
    return [
        compare(of("shifts", how, mean_shifted_accuracy), of("shifts", other, mean_shifted_accuracy))
        for how in _BOTH
    ]


def _on_shifted_real_images(compare, other):
    """PACS tests on domains that nothing was trained on; other real images are corrupted."""
    return [
        [compare(of(study, how, metric), of(study, other, metric)) for how in _BOTH]
        for study, metric in (("transfer", other_domains), ("corruptions", mean_shifted_accuracy))
    ]


def _scratch_beside_them():
    """Scratch as trained for the comparison, on the same processor as the later studies: the same seed ends
    elsewhere on another one."""
    return _compared("scratch", accuracy)


def _plainly(study, method):
    return of(study or "comparison", method)


def _under_shifts(study, method):
    return of(f"shifts-{study}" if study else "shifts", method, mean_shifted_accuracy)


def _faintest(method):
    return of("shifts-layers", method, lambda record: record.results["cue@5"])


def _standard_students(how, measured):
    return [
        lower(measured("components", f"{name}, {how} to standard"), measured("", "scratch"), name=name)
        for name in COMPONENTS
    ]


def _matched_students(how):
    return [
        higher(_components(f"{name}, {how} to matched"), _components(f"{name}, scratch"), name=name)
        for name in COMPONENTS
    ]


def _gain_at_all_sizes(how, measured):
    small, large = (
        higher(measured("sizes", f"{size}, {how}"), measured("sizes", f"{size}, scratch"), name=size)
        for size in ("small", "large")
    )
    standard = higher(measured("pretraining", f"standard, {how}"), measured("", "scratch"), name="standard")
    return [small, standard, large]


def _steps(which, word):
    students = [_layers(f"copy {which} {number}") for number in (1, 2, 3)] + [_compared("copy", accuracy)]
    return [
        higher(after, before, name=f"{nth} {word}")
        for nth, before, after in zip(("second", "third", "fourth"), students, students[1:])
    ]


def _averaged(what, paper):
    return _claim(
        "09",
        f"Averaged over {what}, copied maps lose the whole gain: the student ends below scratch",
        f"{paper} against 83.0; Copy 85.1; analysis",
        lower(_averages(f"copy mean of {what}"), _scratch_beside_them()),
    )


CLAIMS: tuple[Claim, ...] = (
    _claim(
        "05",
        "A student with copied maps beats training from scratch",
        "85.1 against 83.0, main results",
        higher(_central("copy"), _central("scratch")),
    ),
    _claim(
        "05",
        "Copied maps cover most of the distance from scratch to fine-tuning",
        "85.1, between 83.0 and 85.7, main results",
        higher(_central("copy"), _midway(_central)),
    ),
    _claim(
        "05",
        "Maps of an untrained teacher do harm",
        "72.7 against 83.0, main results",
        lower(_central("copy-untrained"), _central("scratch")),
    ),
    _claim(
        "06",
        "A student of distilled maps is as good as fine-tuning",
        "85.7 and 85.7, main results",
        no_worse(_central("distill"), _central("fine-tune")),
    ),
    _claim(
        "06",
        "Distilling maps is better than copying them",
        "85.7 against 85.1, main results",
        higher(_central("distill"), _central("copy")),
    ),
    _claim(
        "06",
        "It is enough to distill the first three quarters of the layers",
        "its recipe: 18 of 24 layers",
        no_worse(
            _layers("distill first 3", name="distill first 3 of 4 layers"),
            _compared("distill", accuracy, name="all"),
        ),
    ),
    _claim(
        "07",
        "Copied queries alone beat training from scratch",
        "85.6 against 83.0, main results",
        higher(_family("copy q"), _family("scratch")),
        real=[[higher(_central("copy-q"), _central("scratch"))]],
    ),
    _claim(
        "07",
        "Copied queries alone are better than copied maps",
        "85.6 against 85.1, main results",
        higher(_family("copy q"), _family("copy")),
        real=[[higher(_central("copy-q"), _central("copy"))]],
    ),
    _claim(
        "08",
        "Every further layer whose maps are copied helps, from the last one on",
        NOT_QUOTED,
        *_steps("last", "layer"),
    ),
    _claim(
        "08",
        "Every further head whose maps are copied helps, in all layers",
        NOT_QUOTED,
        *_steps("heads", "head"),
    ),
    _claim(
        "08",
        "Are maps of the first two layers worth more than those of the last two?",
        NOT_QUOTED,
        higher(_layers("copy first 2"), _layers("copy last 2")),
    ),
    _claim(
        "08",
        "Are maps of the last layers worth more than as many of the first where the mark of the test images"
        " is faintest?",
        NOT_QUOTED,
        *(
            higher(_faintest(f"copy last {n}"), _faintest(f"copy first {n}"), name=f"{n} of 4")
            for n in (1, 2, 3)
        ),
    ),
    _averaged("examples", "79.7"),
    _averaged("queries", "79.9"),
    _averaged("heads", "82.2"),
    _averaged("layers", "82.7"),
    _claim(
        "10",
        "Distilled features are worse than nothing: the student ends below scratch",
        "81.3 against 83.0, analysis",
        lower(_family("features"), _family("scratch")),
    ),
    _claim(
        "10",
        "Distilled features are worth less than distilled maps",
        "81.3 against 85.7, analysis",
        lower(_family("features"), _family("distill")),
    ),
    _claim(
        "11",
        "Does a student with half of the teacher's heads gain from its maps?",
        NOT_QUOTED,
        *(
            higher(
                _pairs(f"two heads, {how} {remedy}"), _pairs("two heads, scratch"), name=f"{how}, {remedy}"
            )
            for how in _BOTH
            for remedy in ("aggregate", "average")
        ),
    ),
    _claim(
        "11",
        "Does a student with half of the teacher's layers gain from its maps?",
        NOT_QUOTED,
        *(
            higher(_pairs(f"shallow, {how} last layers"), _pairs("shallow, scratch"), name=how)
            for how in _BOTH
        ),
    ),
    _claim(
        "11",
        "Does a student that is wider than its teacher gain from its maps?",
        NOT_QUOTED,
        *(higher(_pairs(f"wide, {how}"), _pairs("wide, scratch"), name=how) for how in _BOTH),
    ),
    _claim(
        "13",
        "Are a student's features less like those of the fine-tuned teacher than the features of a second"
        " fine-tuning are?",
        NOT_QUOTED,
        *(
            lower(_compared(how, cka_to_fine_tuned), _compared("fine-tune again", cka_to_fine_tuned), CKA)
            for how in _BOTH
        ),
    ),
    _claim(
        "13",
        "Are they still more like them than the features of a student from scratch are?",
        NOT_QUOTED,
        *(
            higher(_compared(how, cka_to_fine_tuned), _compared("scratch", cka_to_fine_tuned), CKA)
            for how in _BOTH
        ),
        real=[
            [
                higher(
                    _photographed(how, cka_to_fine_tuned), _photographed("scratch", cka_to_fine_tuned), CKA
                )
                for how in _BOTH
            ]
        ],
    ),
    _claim(
        "14",
        "A student of maps and a fine-tuned model, as an ensemble, beat the better of the two",
        "86.3 against 85.7, analysis",
        *_ensemble_gain(_compared),
        real=[_ensemble_gain(_photographed)],
    ),
    _claim(
        "14",
        "Do they also beat an ensemble of two fine-tuned models?",
        NOT_QUOTED,
        *(
            higher(
                _compared(how, ensemble_with("fine-tune"), f"{how} with fine-tune"),
                _compared("fine-tune again", ensemble_with("fine-tune"), "two fine-tunings"),
            )
            for how in _BOTH
        ),
    ),
    _claim(
        "14",
        "Do their answers differ more often from the fine-tuned model's than those of a second"
        " fine-tuning do?",
        NOT_QUOTED,
        *(
            higher(
                _compared(how, disagreement_with("fine-tune")),
                _compared("fine-tune again", disagreement_with("fine-tune")),
            )
            for how in _BOTH
        ),
    ),
    _claim(
        "15",
        "Are distilled maps closer to the teacher's than those that a student finds from scratch?",
        NOT_QUOTED,
        lower(
            _compared("distill", divergence_from_teacher), _compared("scratch", divergence_from_teacher), NATS
        ),
        real=[
            [
                lower(
                    _photographed("distill", divergence_from_teacher),
                    _photographed("scratch", divergence_from_teacher),
                    NATS,
                )
            ]
        ],
    ),
    _claim(
        "15",
        "Does a student that copies only queries come closer to the teacher's maps than the nearly even maps"
        " of an untrained teacher do?",
        NOT_QUOTED,
        lower(
            _compared("copy q", divergence_from_teacher),
            _compared("copy untrained", divergence_from_teacher),
            NATS,
        ),
    ),
    _claim(
        "16",
        "Under shifted test images, transfer falls behind fine-tuning",
        NOT_QUOTED,
        *_on_shifted_images(lower, "fine-tune"),
        real=_on_shifted_real_images(lower, "fine-tune"),
    ),
    _claim(
        "16",
        "Is it also behind in effective robustness, beyond what accuracy without a shift explains?",
        NOT_QUOTED,
        *(lower(beyond_expectation(how), beyond_expectation("fine-tune")) for how in _BOTH),
    ),
    _claim(
        "16",
        "Does transfer keep an advantage over scratch under shifted test images?",
        NOT_QUOTED,
        *_on_shifted_images(higher, "scratch"),
        real=_on_shifted_real_images(higher, "scratch"),
    ),
    _claim(
        "17",
        "Maps of a teacher that was pre-trained on other data are worth less",
        NOT_QUOTED,
        *(lower(_pretraining(f"other data, {how}"), _pretraining(f"standard, {how}")) for how in _BOTH),
    ),
    _claim(
        "17",
        "Where a teacher's features are of no use but its routing is, do its maps beat its weights?",
        NOT_QUOTED,
        *(higher(_pretraining(f"colour, {how}"), _pretraining("colour, fine-tune")) for how in _BOTH),
    ),
    _claim(
        "17",
        "Where features are of no use but routing is, do maps beat weights under shifted test images, too?",
        NOT_QUOTED,
        *(
            higher(
                _under_shifts("pretraining", f"colour, {how}"),
                _under_shifts("pretraining", "colour, fine-tune"),
            )
            for how in _BOTH
        ),
    ),
    _claim(
        "17",
        "Are useless features with useful routing better than useful features with useless routing?",
        NOT_QUOTED,
        higher(
            _pretraining("useless features, useful routing"), _pretraining("useful features, useless routing")
        ),
    ),
    _claim(
        "17",
        "With imbalanced labels, transfer falls behind fine-tuning",
        NOT_QUOTED,
        *(lower(_long_tail(how), _long_tail("fine-tune")) for how in _BOTH),
    ),
    *(
        _claim(
            "18",
            f"Maps of a teacher with a native component, {word}, push a standard student below scratch",
            "arXiv 2605.07191: four of 11 families, up to 5.1 points",
            *_standard_students(how, _plainly),
        )
        for how, word in _COPIED.items()
    ),
    *(
        _claim(
            "18",
            f"Under shifted test images, {word} maps push such a student below scratch, too",
            "arXiv 2605.07191: the failure stays out of distribution",
            *_standard_students(how, _under_shifts),
        )
        for how, word in _COPIED.items()
    ),
    *(
        _claim(
            "18",
            f"A student that has the component too, with random weights, gains from {word} maps",
            "arXiv 2605.07191: in all four families",
            *_matched_students(how),
        )
        for how, word in _COPIED.items()
    ),
    _claim(
        "18",
        "The component alone does not help a student from scratch",
        "arXiv 2605.07191",
        *(
            no_better(_components(f"{name}, scratch"), _scratch_beside_them(), name=name)
            for name in COMPONENTS
        ),
    ),
    *(
        _claim(
            "19",
            f"{word.capitalize()} maps beat scratch at every size",
            NOT_QUOTED,
            *_gain_at_all_sizes(how, _plainly),
        )
        for how, word in _COPIED.items()
    ),
    *(
        _claim(
            "19",
            f"Do {word} maps keep their gain at every size under shifted test images?",
            NOT_QUOTED,
            *_gain_at_all_sizes(how, _under_shifts),
        )
        for how, word in _COPIED.items()
    ),
    _claim(
        "19",
        "Does a small teacher help a student that is larger than itself?",
        NOT_QUOTED,
        *(
            higher(_sizes(f"small teacher, large student, {how}"), _sizes("large, scratch"), name=how)
            for how in _BOTH
        ),
    ),
)


def claims_table(*chapters: str, results: Path | None = None) -> str:
    """The claims of some chapters ("05"), of all when none is named, as a Markdown table with figures and
    verdicts at two scales.

    results: the folder of the records, by default the book's. With more than one chapter there is a column
    that links to its notebook. Raises `ValueError` for a chapter without claims.
    """
    for chapter in chapters:
        require_known("chapter with claims", chapter, NOTEBOOKS)
    results = results_folder() if results is None else Path(results)
    shown = [claim for claim in CLAIMS if claim.chapter in (chapters or NOTEBOOKS)]
    rows = [["chapter", "claim", "paper", "built-in", "real images"], ["---"] * 5]
    rows += [
        [
            f"[{claim.chapter}](../notebooks/{NOTEBOOKS[claim.chapter]}.md)",
            claim.says,
            claim.paper,
            _cell(claim.built_in(results)),
            _cell(claim.real(results)),
        ]
        for claim in shown
    ]
    return "\n".join(f"| {' | '.join(row[len(chapters) == 1 :])} |" for row in rows)


def _cell(evidence: Evidence) -> str:
    return f"{evidence.figures}: **{evidence.verdict}**"
