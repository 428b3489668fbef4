"""Draw the picture of the README, book/assets/the-experiment.svg, from the records: `python -m
tools.front_picture`. The front page of the book has its
pictograms (atbook/drawing/pictograms.py)."""

from pathlib import Path

import matplotlib

from atbook import plot
from atbook.lab.shown import both_worlds, percent

PICTURE = Path(__file__).resolve().parent.parent / "book" / "assets" / "the-experiment.svg"
GETS = {
    "scratch": "no teacher",
    "copy-message-twin": "message only",
    "copy-routing-twin": "routing only",
    "copy": "the maps",
    "fine-tune": "the weights",
}


def says() -> str:
    """The picture in words, with its numbers; the file keeps them as its description."""
    worlds = both_worlds().items()
    return "; ".join(
        f"{world}, {words}: {percent(estimates.get(method))}"
        for world, estimates in worlds
        for method, words in GETS.items()
    )


def main() -> None:
    # the same file from the same numbers: no random names in it, and no date
    matplotlib.rcParams["svg.hashsalt"] = "the-experiment"
    figure = plot.estimates(both_worlds(), GETS, chance=1 / 8)
    figure.savefig(PICTURE, metadata={"Date": None, "Description": says()}, facecolor="white")
    print(f"wrote {PICTURE}")


if __name__ == "__main__":
    main()
