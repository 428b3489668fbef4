"""How a page shows what was recorded: recipes, accuracies of the two worlds, tables."""

from collections.abc import Mapping
from pathlib import Path

from atbook.lab.findings import SCRATCH
from atbook.lab.verdicts import Estimate, accuracies
from atbook.records import find_record, markdown_table
from atlib.train.recipe import Recipe

WORLDS = {"Find": "find", "Match": "match"}  # name in the text: name of the scale


def recorded_recipe(scale: str, method: str, study: str = "transfer", **changes) -> Recipe:
    """The recipe of a reported run, but for `changes`. Raises as `atbook.records.find_record` does."""
    return Recipe.described(find_record(study, method, scale=scale).config["recipe"] | changes)


def both_worlds(results: Path | None = None) -> dict[str, dict[str, Estimate]]:
    """{"Find" or "Match": {method: test accuracy}} of the central experiment; "scratch" is the mean of three
    first weights a seed."""
    of = {"scratch": SCRATCH}
    return {name: accuracies("transfer", scale, of, results) for name, scale in WORLDS.items()}


def percent(accuracy: Estimate | None) -> str:
    """ "82.0 [80.0, 84.0]": an accuracy in per cent with its 95 % interval; a dash for None."""
    if accuracy is None:
        return "–"
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
