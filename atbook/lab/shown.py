"""How a page shows what was recorded: recipes, accuracies of the two worlds, tables, verdicts, shares."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from atbook.lab.findings import CLAIMS, SCALES, SCRATCH, verdicts
from atbook.lab.searches import did_not_learn
from atbook.lab.study import Place, Study, at_an_end
from atbook.lab.verdicts import NOT_RECORDED, Estimate, Share, Side, accuracies, share_of
from atbook.records import by_method, find_record, markdown_table, read_records, results_folder, spread
from atlib._util import require_known
from atlib.recipe import Recipe

WORLDS = {"Find": "find", "Match": "match"}  # name in the text: name of the scale
# The figures of studies, of test images, as the head of a column says them.
FIGURES = {"accuracy": "test accuracy", "map": "mean average precision", "ap": "box AP", "iou": "mean IoU"}


def recorded_recipe(scale: str, method: str, study: str = "transfer", **changes) -> Recipe:
    """The recipe of a reported run, but for `changes`. Raises as `atbook.records.find_record` does."""
    return Recipe.described(find_record(study, method, scale=scale).config["recipe"] | changes)


def both_worlds(results: Path | None = None) -> dict[str, dict[str, Estimate]]:
    """{"Find" or "Match": {method: test accuracy}} of the central experiment, and of students that train only
    a part of the teacher; "scratch" is the mean of three first weights a seed."""
    of = {"scratch": SCRATCH}
    return {
        name: accuracies("transfer", scale, of, results) | accuracies("partly-tuned", scale, results=results)
        for name, scale in WORLDS.items()
    }


def percent(accuracy: Estimate | None) -> str:
    """ "82.0 [80.0, 84.0]": an accuracy in per cent with its 95 % interval; "did not learn in 8 trials" where
    nothing in the method's search left guessing; a dash for None."""
    if accuracy is None:
        return "–"
    if accuracy.unlearned:
        return f"did not learn in {accuracy.unlearned} trials"
    return f"{100 * accuracy.mean:.1f} [{100 * accuracy.low:.1f}, {100 * accuracy.high:.1f}]".replace(
        "-", "−"
    )


def accuracy_table(worlds: Mapping[str, Mapping[str, Estimate]], methods: Mapping[str, str]) -> str:
    """Methods by worlds, as a Markdown table. methods: {method: what the student gets, in words}."""
    rows = [
        [f"`{method}`", words, *(percent(world.get(method)) for world in worlds.values())]
        for method, words in methods.items()
    ]
    return markdown_table(["method", "what the student gets", *worlds], *rows)


def study_table(study: Study, scale: str, results: Path | None = None) -> str:
    """What a study has recorded at a scale, as a Markdown table: variants by their own figure, in per cent,
    mean ± standard deviation over seeds, with " ‡" where the recipe lies at an end of what was tried
    (`atbook.lab.study.at_an_end`), and "did not learn in 8 trials" where nothing in the search left guessing;
    and the number of seeds. A study of several figures has a column for each.

    results: the folder of the records, by default the book's.
    """
    results = results_folder() if results is None else results
    of_variant = {variant.name: variant.measure.figure for variant in study.variants}
    records = read_records(study.name, scale, results=results)
    figures = list(dict.fromkeys(of_variant[record.method] for record in records))
    waiting = at_an_end(study, Place(scale, None, results, Path()))
    unlearned = did_not_learn(study.name, scale, results)
    rows = []
    for method in dict.fromkeys(record.method for record in records):
        main_figure = of_variant[method]
        (values,) = by_method([r for r in records if r.method == method], f"test_{main_figure}").values()
        cell = spread([100 * value for value in values])
        if method in unlearned:
            cell = f"did not learn in {unlearned[method]} trials"
        cells = [cell if figure == main_figure else "" for figure in figures]
        rows.append([method + " ‡" * (method in waiting), *cells, len(values)])
    return markdown_table(["variant", *(FIGURES[figure] for figure in figures), "seeds"], *rows)


def verdict_line(claim: str, *scales: str, results: Path | None = None) -> str:
    """A claim with its verdict at each of some scales, in Markdown: "sentence: **holds** (CIFAR-10; in 5 of 5
    seeds, +19.1 points, 17.0 to 21.2)". The interval is that of `atbook.lab.verdicts.Judged`.

    results: the folder of the records, by default the book's. Raises `ValueError` for an id without a claim
    and a scale at which it is not asked.
    """
    require_known("claim", claim, [entry.id for entry in CLAIMS])
    (asked,) = (entry for entry in CLAIMS if entry.id == claim)
    for scale in scales:
        require_known("scale", scale, asked.scales)
    judged = {answer.scale: answer for answer in verdicts(results=results) if answer.claim == asked}
    parts = []
    for scale in scales or asked.scales:
        answer = judged[scale]
        if answer.verdict == NOT_RECORDED:
            parts.append(f"**{NOT_RECORDED}** ({SCALES[scale]})")
            continue
        mean, low, high = (f"{100 * value:+.1f}" for value in answer.estimate[:3])
        seeds = f"in {answer.seeds_for} of {answer.estimate.seeds} seeds"
        parts.append(f"**{answer.words}** ({SCALES[scale]}; {seeds}, {mean} points, {low} to {high})")
    return f"*{asked.sentence}*: " + ", ".join(parts).replace("-", "−").replace("CIFAR−10", "CIFAR-10") + "."


def kept_share(scale: str, part: Side, whole: Side, base: Side, results: Path | None = None) -> Share | None:
    """What share of the gain of `whole` over `base` the students `part` keep, with its 95 % interval, in the
    seeds that all three have; None with fewer than two of them. A side's records are those of its study."""
    sides = [side.values(read_records(side.study, scale, results=results)) for side in (part, whole, base)]
    shared = sorted(set.intersection(*map(set, sides)))
    if len(shared) < 2:
        return None
    of_part, of_whole, of_base = (np.stack([side[seed] for seed in shared]) for side in sides)
    return share_of(of_part - of_base, of_whole - of_base)
