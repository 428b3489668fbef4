"""The ruler on top of a chapter: a line from scratch to fine-tuning, with the place of its method."""

from typing import NamedTuple

from atbook.drawing.svg import GREY, drawing, number, text
from atbook.plot import COLOURS
from atbook.records import read_records

LEFT, RIGHT, STEP = 14, 346, 54  # ends of a line; from line to line
SCRATCH = ("scratch", "scratch-2", "scratch-3")


class Mark(NamedTuple):
    """A method on a line."""

    #: Said above its place.
    name: str
    #: In the records.
    method: str
    #: Of its records, where it is not that of the line.
    study: str | None = None


class Line(NamedTuple):
    """A line of a ruler: from scratch to fine-tuning in one study's records at one scale."""

    #: Said at its left end.
    where: str
    study: str
    scale: str
    marks: tuple[Mark, ...]


def in_worlds(*marks: Mark) -> tuple[Line, ...]:
    return tuple(Line(scale.title(), "transfer", scale, marks) for scale in ("match", "find"))


PHOTOGRAPHS = ("CIFAR-10", "real", "real-cifar10")
RULERS = {
    "copy": in_worlds(Mark("Copy", "copy")),
    "routing": in_worlds(Mark("maps of a routing twin", "copy-routing-twin")),
    "photographs": (
        Line(*PHOTOGRAPHS, (Mark("Copy", "copy"),)),
        Line(*PHOTOGRAPHS, (Mark("the blind student", "copy, blank image"),)),
    ),
    "distill": in_worlds(Mark("Distill", "distill")),
    "queries": in_worlds(Mark("copied queries", "copy-q")),
    "signals": in_worlds(
        Mark("answers", "soft predictions", "family"), Mark("features", "features", "family")
    ),
    "untrained": in_worlds(Mark("maps of an untrained teacher", "copy-untrained")),
}


def ruler(lines: tuple[Line, ...]) -> str:
    """The drawing, an SVG file. The way from scratch to fine-tuning is thick; a line goes on, thin, to a
    method that lies outside of it."""
    parts, phrases, labels, seeds = [], [], set(), set()
    for row, line in enumerate(lines):
        measured = [_measured(line, SCRATCH), _measured(line, ("fine-tune",))]
        measured += [_measured(line, (mark.method,), mark.study) for mark in line.marks]
        means = [one.mean for one in measured]
        labels |= {one.labels for one in measured}
        seeds |= {one.seeds for one in measured}
        scale = (RIGHT - LEFT) / (max(means) - min(means))
        start, end, *places = (LEFT + scale * (mean - min(means)) for mean in means)
        y = 22 + row * STEP
        parts.append(f'<path d="M{LEFT} {y}H{RIGHT}" stroke="{GREY}" stroke-width="1.5"/>')
        parts.append(f'<path d="M{number(start)} {y}H{number(end)}" stroke="{GREY}" stroke-width="5"/>')
        ticks = f"M{number(start)} {y - 7}v14M{number(end)} {y - 7}v14"
        parts.append(f'<path d="{ticks}" stroke="{GREY}" stroke-width="2"/>')
        scratch, fine_tuned, *reached = (f"{100 * mean:.1f} %" for mean in means)
        far = start > (LEFT + RIGHT) / 2  # then its words would run into the others
        words = f"{line.where}: scratch {scratch}"
        parts.append(text(start + (-12 if far else -10), y + 20, words, "end" if far else "start"))
        parts.append(text(end + 10, y + 20, f"fine-tuning {fine_tuned}", "end"))
        for mark, x, reaches, mean in zip(line.marks, places, reached, means[2:]):
            colour = COLOURS.get(mark.method, "currentColor")
            parts.append(f'<circle cx="{number(x)}" cy="{y}" r="6" fill="{colour}" stroke="{GREY}"/>')
            anchor, nudge = ("start", -6) if x < 100 else ("end", 6) if x > 250 else ("middle", 0)
            parts.append(text(x + nudge, y - 10, f"{mark.name} {reaches}", anchor, bold=True))
            way = 100 * (mean - means[0]) / (means[1] - means[0])
            phrases.append(f"{line.where}, {mark.name}: {reaches}, {way:.0f} % of the way")
    counts = [" or ".join(f"{count:,}" for count in sorted(values)) for values in (labels, seeds)]
    y = 22 + len(lines) * STEP
    parts.append(text(LEFT - 10, y, "Test accuracy, {} labels, mean of {} seeds.".format(*counts), "start"))
    return drawing(y + 6, "A line from scratch to fine-tuning. " + "; ".join(phrases) + ".", parts)


class _Measured(NamedTuple):
    mean: float
    labels: int
    seeds: int


def _measured(line: Line, methods: tuple[str, ...], study: str | None = None) -> _Measured:
    """The mean test accuracy of methods, as a share."""
    records = [one for one in read_records(study or line.study, line.scale) if one.method in methods]
    (labels,) = {record.config["labels"] for record in records}
    mean = sum(record.results["test_accuracy"] for record in records) / len(records)
    return _Measured(mean, labels, len({record.seed for record in records}))
