"""The page that a run and a table end in, against what the runs' folders hold."""

import re
import shlex
from html import unescape
from pathlib import Path
from unittest.mock import Mock

import torch

from atfamily.measures.predictions import Interval
from atlib import load_teacher, transfer, walk
from atlib.evaluate import predict
from atlib.pair import Normalisation
from atrun import __main__ as command
from atrun import commands, one_call
from atrun.build import held_out_images
from atrun.config import read_config
from atrun.log import read_log
from atrun.report import table_report
from tests.looking.reading import content_of, rows_of
from tests.run.test_generic import photographs as photographs  # a fixture
from tests.run.test_generic import teacher_file

FEW = {"epochs": "1", "lr": "1e-3", "betas": "[0.9, 0.95]"}


def read(page):
    """The texts of all rows of tables, by their first cell, and the words of the command."""
    rows = [re.findall(r"<td>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", page)]
    texts = [[unescape(re.sub("<.*?>", "", cell)) for cell in row] for row in rows if row]
    words = shlex.split(unescape(re.search("<pre>(python -m atlib .*?)</pre>", page, re.S)[1]))
    return {name: cells for name, *cells in texts}, words[3:]


def wilson(right):
    n, p, z = len(right), right.double().mean().item(), 1.959963984540054
    middle, reach = p + z * z / (2 * n), z * (p * (1 - p) / n + z * z / (4 * n * n)) ** 0.5
    low, high = (100 * (middle + sign * reach) / (1 + z * z / n) for sign in (-1, 1))
    return [f"{n}", f"{100 * p:.2f}", f"{low:.2f} to {high:.2f}"]


def test_the_page_of_a_run(tmp_path, photographs, monkeypatch):
    for split in ("train", "validation"):
        (Path(photographs) / split / "dog").rename(Path(photographs) / split / "<b>&")
    teacher = teacher_file(tmp_path / "teacher <i>.safetensors", Normalisation(0.5, 0.25))
    found = transfer(teacher, photographs, "half", out=tmp_path / "run", seed=3, settings=FEW)
    page = (found.folder / "report.html").read_text()
    assert f"report: {found.folder / 'report.html'}" in found.report
    assert "<b>" not in page and "<i>" not in page and "&lt;b&gt;&amp;" in page
    assert not re.search(r"""(src|href)\s*=\s*["']?(http|//)""", page), "it needs no network"
    config, (rows, words) = read_config(found.folder), read(page)
    again = []
    monkeypatch.setattr(commands, "dry_run", lambda config, processes: again.append(config.on(24)) or 0)
    assert command.main([*words, "--dry-run"]) == 0 and again == [config]
    images = held_out_images(photographs, "validation", config.augmentation)
    right = predict(found.student, images).argmax(1) == images.targets
    assert torch.equal(right, found.right) and rows["all"] == wilson(right)
    assert float(rows["all"][1]) == round(100 * found.record.results["validation_accuracy"], 2)
    for label, name in enumerate(images.classes):
        assert rows[name] == wilson(right[images.targets == label])
    first, second = (entry["images_per_second"] for entry in read_log(found.folder)[:2])
    assert rows["images a second, median"] == [f"{(first + second) / 2:,.1f}"]
    # student and teacher can be clicked through, on the first image of the evaluation
    student, teaching = content_of(page)["models"]
    assert (student["name"], teaching["name"]) == ("student", "teacher")
    pixels = images.take([0])[0]
    for model, stored in ((found.student, student), (load_teacher(teacher, quiet=True).vit, teaching)):
        with torch.no_grad():
            map = walk(model.eval(), pixels).layers[1].map[0, 0].numpy()
        rows = rows_of(stored)
        for query in (0, 5):  # of an image that was stored in 8 bits
            assert abs(rows[1, 0, query] - map[query]).max() <= 0.02


def test_the_page_of_a_table(tmp_path, photographs, monkeypatch):
    teacher, out = teacher_file(tmp_path / "teacher.safetensors", Normalisation(0.5, 0.25)), tmp_path / "out"
    asked = teacher, photographs, ["scratch", "copy"], "half"
    table = one_call.compare_methods(*asked, out=out, seeds=1, settings=FEW)
    page = (out / "report.html").read_text()
    assert re.findall('href="(.*?)"', page) == ["scratch-0/report.html", "copy-0/report.html"]
    assert (out / "scratch-0/report.html").exists() and (out / "copy-0/report.html").exists()
    monkeypatch.setattr(one_call, "compare_methods", said := Mock(**{"return_value.text.return_value": ""}))
    assert command.main(read(page)[1]) == 0
    said.assert_called_once_with(*asked, out=tmp_path / "out-again", seeds=1, settings=FEW)
    table.rows["copy"] = {"accuracies": [0.5, 0.25], "seconds": [3, 4.5], "folders": ["a-0", "a-1"]}
    table.differences["copy", "scratch"] = Interval(-0.125, -0.25, 0.0625)
    rows, _ = read(table_report(out, [], table).read_text())
    assert rows["copy"] == ["37.50", "50.00 25.00", "-12.50 (-25.00 to +6.25)", "7.5"]
