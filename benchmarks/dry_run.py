"""The seconds that a dry run expects of an epoch, compared with measured ones: `python
benchmarks/dry_run.py`.

For each recipe of the built-in scale, `python -m atlib train --dry-run` estimates the seconds of an epoch
from a few steps on random numbers; then the run is carried out and timed. The figure is the ratio, taken
several times in one run; 1 would be exact.
"""

import argparse
import statistics
import time

from recording import leave

from atbook.worlds import marked_glyphs
from atlib.train import train
from atrun.configure import configure
from atrun.estimate import assembled, estimate

RECIPES = ("find-scratch", "find-copy", "find-distill")
IMAGES, CLASSES = 1000, 8


def ratio(recipe: str) -> float:
    """Estimated over measured seconds of the second epoch; the first one warms up."""
    teacher = None if recipe.endswith("scratch") else __file__  # a dry run only looks whether there is a file
    config = configure(recipe, "atbook.worlds:marked_glyphs", teacher).on(IMAGES)
    expected, ends = estimate(config, IMAGES, CLASSES), []
    train(
        assembled(config, CLASSES),
        marked_glyphs(size=IMAGES),
        config.recipe,
        progress=None,
        stop_at=2 * expected.steps_per_epoch,
        log=lambda entry: ends.append(time.perf_counter()) if entry["event"] == "epoch" else None,
    )
    return expected.seconds * expected.steps_per_epoch / (ends[1] - ends[0])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=5)
    options = parser.parse_args()
    start = time.perf_counter()
    by_recipe = {recipe: [ratio(recipe) for _ in range(options.repetitions)] for recipe in RECIPES}
    for recipe, ratios in by_recipe.items():
        print(
            f"{recipe:20} estimate / measured {statistics.median(ratios):.2f} ({min(ratios):.2f} to"
            f" {max(ratios):.2f})"
        )
    results = {
        recipe: {"ratio": statistics.median(ratios), "low": min(ratios), "high": max(ratios)}
        for recipe, ratios in by_recipe.items()
    }
    config = {"repetitions": options.repetitions, "images": IMAGES}
    leave("dry_run", config, results, [], start, None)


if __name__ == "__main__":
    main()
