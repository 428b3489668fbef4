"""A run, and a table of methods, as a page in one file that needs no network: FOLDER/report.html."""

import base64
import shlex
from collections.abc import Sequence
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

import torch
from scipy.stats import binomtest
from torch import Tensor, nn

from atlib._util import write_atomically
from atlib.pair import Normalisation, student_of, usual_image_size
from atlib.vit import VITS
from atrun.log import as_line, read_log
from atrun.looking.page import PAGE, filled, look
from atrun.looking.preparation import Preparation
from atrun.pictures import as_file
from atrun.plot import curves
from atrun.record import Record

STYLE = """<style>.wide { overflow-x: auto; } .wide svg { display: block; background: white; }
h2 { font-size: 1.1rem; margin: 1.6rem 0 0.4rem; } p { overflow-wrap: anywhere; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; padding: 0.6rem; border: 1px solid #8888; }
table { border-collapse: collapse; } td, th { padding: 0.2rem 0.7rem 0.2rem 0; text-align: right; }
td, th { vertical-align: top; border-bottom: 1px solid #8888; }
td:first-child, th:first-child { text-align: left; overflow-wrap: anywhere; }</style>"""


def run_report(
    folder: Path,
    words: Sequence[str],
    rules: str,
    student: nn.Module,
    record: Record,
    images: Any,
    right: Tensor | None,
    teacher: nn.Module | None,
) -> Path:
    """Write the page of a finished run: how it is repeated, what was derived, curves, maps, accuracy, cost.

    words: the command that repeats it; rules: as `configured` gives them; images: of its evaluation; right:
    which of them the student has right, (n,) of truths; None where a run has no labels; teacher: where the
    student does not keep it; with images, where both look on the first can be clicked through. Returns the
    page's path; raises `ValueError` for a run without a log.
    """
    parts = [_command(words, folder), "<h2>What was derived</h2>", f"<pre>{escape(rules)}</pre>"]
    svg = as_file(curves([folder]), "svg").decode()
    label = '<svg role="img" aria-label="Losses and accuracies by epoch"'
    svg = svg[svg.index("<svg") :].replace("<svg", label, 1)
    parts += ["<h2>Curves</h2>", f'<div class="wide">{svg}</div>']
    parts += [f"<p>At the end: {escape(as_line(record.results))}</p>"]
    if drawn := sorted(folder.glob("maps/step-*.png")):
        picture = base64.b64encode(drawn[-1].read_bytes()).decode()
        alt = "Images of the evaluation, the teacher's maps where it has one, and the student's"
        image = f'<img src="data:image/png;base64,{picture}" alt="{alt}">'
        parts += ["<h2>Where teacher and student look</h2>", f'<div class="wide">{image}</div>']
    if images is not None and isinstance(student_of(student), VITS):
        parts += ["<h2>The first image of the evaluation, to click through</h2>"]
        parts += [_clickable(student, getattr(student, "teacher", teacher), images)]
    if right is not None:
        parts += ["<h2>Accuracy</h2>", _accuracies(right, images.targets, images.classes)]
        parts += ["<p>95 % intervals over other images (Wilson), not other seeds.</p>"]
    speeds = [entry["images_per_second"] for entry in read_log(folder) if "images_per_second" in entry]
    cost = {
        "training": f"{record.seconds:,.1f} s",
        "images a second, median": f"{median(speeds):,.1f}" if speeds else "not logged",
        "student's weights": f"{sum(weight.numel() for weight in student_of(student).parameters()):,}",
        "largest memory": f"{record.peak_memory_mb:,.0f} MB",
        "device": record.about["device"],
    }
    parts += ["<h2>Cost</h2>", _table(["", ""], [[name, escape(str(value))] for name, value in cost.items()])]
    title = f"{folder.resolve().name}: {record.method} on {Path(record.config['data']).name}"
    return _page(folder, title, parts)


def table_report(out: Path, words: Sequence[str], table: Any) -> Path:
    """Write the page of an `atrun.one_call.Table`, with links to the runs' pages. words: the command that
    repeats it. Returns the page's path."""
    base, rows = next(iter(table.rows)), []
    differences = {pair: in_points(*interval) for pair, interval in table.differences.items()}
    for name, row in table.rows.items():
        links = [
            f'<a href="{Path(folder).name}/report.html">{100 * accuracy:.2f}</a>'
            for folder, accuracy in zip(row["folders"], row["accuracies"])
        ]
        mean = f"{100 * sum(row['accuracies']) / len(links):.2f}"
        difference = differences.get((name, base), "")
        rows.append([escape(name), mean, " ".join(links), difference, f"{sum(row['seconds']):,.1f}"])
    heads = ["method", "accuracy, %", "of each seed", f"less {escape(base)}", "seconds"]
    pairs = [[escape(f"{first} less {second}"), text] for (first, second), text in differences.items()]
    parts = [_command(words, out), "<h2>Methods</h2>", _table(heads, rows)]
    parts += ["<h2>All differences</h2>", _table(["", "points"], pairs)] if pairs else []
    parts += ["<p>95 % intervals over other images (paired bootstrap), not other seeds.</p>"]
    return _page(out, f"{out.resolve().name}: methods on the same {table.images:,} images", parts)


def _command(words: Sequence[str], folder: Path) -> str:
    line = shlex.join(["python", "-m", "atlib", *words, "--out", f"{folder.resolve()}-again"])
    return f"<h2>The command that repeats it</h2><pre>{escape(line)}</pre>"


def _clickable(student: nn.Module, teacher: nn.Module | None, images: Any) -> str:
    """The block of `look`, or why there is none."""
    seen = images.normalisation
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (seen.mean, seen.std))
    pixels = images.take([0])[0][0].cpu() * std + mean
    models = {"student": student} | ({} if teacher is None else {"teacher": teacher})
    prepared = {}
    for name, model in models.items():
        vit = student_of(model)
        normalisation = seen if name == "student" else Normalisation.of(vit) or seen
        size = usual_image_size(vit) or tuple(pixels.shape[1:])
        prepared[name] = Preparation(size, normalisation.mean, normalisation.std, source="as in the run")
    try:
        picture = (255 * pixels.clamp(0, 1)).round().to(torch.uint8)
        return look(models, picture, preparation=prepared, megabytes=3).html()
    except ValueError as error:  # of rows that do not fit, and of other than three channels
        return f"<p>{escape(str(error))}</p>"


def _accuracies(right: Tensor, labels: Tensor, classes: Sequence[str]) -> str:
    parts = [("all", right)]
    for label in labels.unique().tolist():
        parts.append((escape(str(classes[label] if classes else label)), right[labels == label]))
    rows = []
    for name, part in parts:
        count, n = int(part.sum()), len(part)
        low, high = binomtest(count, n).proportion_ci(method="wilson")
        rows.append([name, f"{n:,}", f"{100 * count / n:.2f}", f"{100 * low:.2f} to {100 * high:.2f}"])
    return _table(["class", "images", "accuracy, %", "interval"], rows)


def in_points(mean: float, low: float, high: float) -> str:
    """A difference of shares, with its interval."""
    return f"{100 * mean:+.2f} ({100 * low:+.2f} to {100 * high:+.2f})"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Of cells that are HTML already."""
    head = f"<tr>{''.join(f'<th>{name}</th>' for name in heads)}</tr>" if any(heads) else ""
    body = "\n".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table>{head}\n{body}</table></div>'


def _page(folder: Path, title: str, parts: Sequence[str]) -> Path:
    page = filled(PAGE, {"__TITLE__": escape(title), "__BLOCK__": "\n".join([STYLE, *parts])})
    return write_atomically(folder / "report.html", page.encode())
