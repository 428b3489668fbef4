"""Finished runs are compared, drawn, asked about pictures, and run again by their config."""

import csv
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.stats import norm
from torchvision.transforms import functional as F

from atlib.checkpoint import load_vit, read_header, read_tensors, save_vit, write_tensors
from atlib.vit import Architecture
from atrun import __main__ as command
from atrun import plot
from atrun.compare import compare_runs, compared
from atrun.config import read_config, write_config
from atrun.configure import configure_again
from atrun.log import read_log
from atrun.record import read_record
from tests.helpers import made_once
from tests.picture_files import CLASSES, cut_jpeg, picture, write_folders
from tests.run.photographs import asked as asked_for_photographs
from tests.run.photographs import said
from tests.stopped_runs import asked
from tests.stopped_runs import few_held_out as few_held_out  # a fixture

TEACHER = "results/transfer/find/teacher-seed0.safetensors"
SCALED = ("augmentation.mean=[0.5,0.5,0.5]", "augmentation.std=[0.25,0.25,0.25]", "augmentation.crop_pct=1")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Three runs: distill and scratch on the world Find, and scratch on photographs."""

    def make(folder):
        data = write_folders(folder / "photographs", "train", range(12))
        write_folders(data, "validation", range(12, 21))
        assert command.main(asked("find-distill", folder / "distill", "--teacher", TEACHER)) == 0
        assert command.main(asked("find-scratch", folder / "scratch")) == 0
        assert (
            command.main(asked_for_photographs(data, folder / "read", *SCALED, "ema=0.5", "binary=true")) == 0
        )

    return made_once(tmp_path_factory, "finished-runs", make)[0]


# --- compare ---


def logits_of(right):
    """Logits (n, 2) that name class 0 where `right`, for labels that are all 0."""
    return torch.where(torch.tensor(right)[:, None], torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]))


def test_mcnemar_by_hand():
    """8 images only the first has right, 2 only the second: of 10 fair coins, 2 (1 + 10 + 45) / 1024."""
    first = [True] * 8 + [False] * 2 + [True] * 20 + [False] * 10
    second = [False] * 8 + [True] * 2 + [True] * 20 + [False] * 10
    found = compared(logits_of(first), logits_of(second), torch.zeros(40, dtype=torch.long))
    assert (found.first, found.second) == (28 / 40, 22 / 40)
    assert (found.only_first, found.only_second) == (8, 2)
    assert found.p == pytest.approx(112 / 1024)
    assert found.difference.mean == pytest.approx(6 / 40)
    low, high = found.difference.low, found.difference.high
    # the sum of 40 values in -1, 0, 1: about normal
    spread = norm.ppf(0.975) * math.sqrt(10 / 40 - (6 / 40) ** 2) / math.sqrt(40)
    assert low == pytest.approx(6 / 40 - spread, abs=0.03)
    assert high == pytest.approx(6 / 40 + spread, abs=0.03)


def test_runs_are_compared_on_the_images_that_they_were_evaluated_on(runs, capsys):
    found = compare_runs(runs / "distill", runs / "scratch")
    for accuracy, name in ((found.first, "distill"), (found.second, "scratch")):
        assert accuracy == read_record(runs / name / "record.json").results["test_accuracy"]
    other = compare_runs(runs / "scratch", runs / "distill")
    assert (other.only_first, other.only_second, other.p) == (found.only_second, found.only_first, found.p)
    code, out, _ = said(capsys, "compare", runs / "distill", runs / "scratch")
    assert code == 0 and f"{100 * found.difference.mean:+.2f} points" in out and f"p = {found.p:.2g}" in out
    itself = compare_runs(runs / "read", runs / "read", averaged=True)
    assert itself.only_first == itself.only_second == 0
    assert itself.first == read_record(runs / "read" / "record.json").results["average_validation_accuracy"]


def test_runs_on_one_folder_and_its_copy_are_compared_and_on_another_refused(runs, tmp_path, capsys):
    config = json.loads((runs / "read" / "config.json").read_text())
    data = Path(config["data"])
    shutil.copytree(data, tmp_path / "copy"), shutil.copytree(data, tmp_path / "other")
    files = sorted((tmp_path / "other").rglob("*.png"))
    with Image.open(files[-1]) as last:
        size = last.size
    for file in files:
        Image.new("RGB", size, (9, 99, 199)).save(file)
    for name in ("copy", "other"):
        run = tmp_path / f"run-{name}"
        shutil.copytree(runs / "read", run)
        (run / "config.json").write_text(json.dumps(config | {"data": str(tmp_path / name)}))
    found = compare_runs(runs / "read", tmp_path / "run-copy")
    assert found.only_first == found.only_second == 0
    for one in (tmp_path / "copy").glob("*/*"):  # classes of other names
        one.rename(one.with_name(f"a-{one.name}"))
    code, _, wrong = said(capsys, "compare", tmp_path / "run-copy", tmp_path / "run-copy")
    assert code == 2 and "has classes" in wrong
    code, _, wrong = said(capsys, "compare", runs / "read", tmp_path / "run-other")
    assert code == 2 and "different images" in wrong


# --- plot ---


def test_the_curves_are_those_of_the_logs(runs):
    axes = plot.curves([runs / "distill", runs / "scratch"]).axes
    assert [panel.get_title() for panel in axes] == ["task loss", "transfer loss", "accuracy"]
    drawn = {(p.get_title(), x.get_label()): x.get_xydata().tolist() for p in axes for x in p.lines}
    entries = {name: read_log(runs / name) for name in ("distill", "scratch")}
    passes = {name: [one for one in of if one["event"] == "epoch"] for name, of in entries.items()}
    assert set(drawn) == {
        ("task loss", "distill"),
        ("task loss", "scratch"),
        ("transfer loss", "distill"),
        ("accuracy", "distill, test"),
        ("accuracy", "scratch, test"),
    }
    fields = {"task loss": "task_loss", "transfer loss": "transfer_loss", "accuracy": "test_accuracy"}
    for (title, label), points in drawn.items():
        name, field = label.partition(",")[0], fields[title]
        assert points == [[one["epoch"], one[field]] for one in passes[name] if field in one]


def test_a_picture_is_written_or_refused(runs, tmp_path, capsys):
    out = tmp_path / "curves.png"
    code, printed, _ = said(capsys, "plot", runs / "scratch", runs / "read", "--out", out)
    assert code == 0 and printed.strip() == str(out)
    assert np.asarray(Image.open(out).convert("L")).std() > 5, "a picture of one colour shows nothing"


# --- predict ---


def by_hand(weights: Path, file: Path, binary: bool = True) -> list[float]:
    """Probabilities of one picture, by a model that has learned each class by itself or
    not: the whole of it in 16 x 16 pixels, scaled as `SCALED` says."""
    image = Image.open(file).convert("RGB")
    scale = 16 / min(image.size)
    wide, high = (round(side * scale) for side in image.size)
    pixels = F.to_tensor(F.center_crop(image.resize((wide, high), Image.Resampling.BICUBIC), 16))
    with torch.no_grad():
        logits = load_vit(weights).eval()(((pixels - 0.5) / 0.25)[None])
    return (logits[0].sigmoid() if binary else logits[0].softmax(-1)).tolist()


def test_classes_of_pictures_as_csv_and_json(runs, tmp_path, capsys):
    folder = tmp_path / "new"
    (folder / "deep").mkdir(parents=True)
    for index, name in enumerate(["b.png", "a.jpg", "deep/c.PNG"]):
        picture(index * 9, (20, 16)).save(folder / name)
    (folder / "notes.txt").write_text("no picture")
    code, printed, _ = said(capsys, "predict", runs / "read", folder)
    assert code == 0
    header, *lines = csv.reader(printed.splitlines())
    assert header == ["file", "class", "probability", *CLASSES]
    assert [line[0] for line in lines] == [str(folder / name) for name in ("a.jpg", "b.png", "deep/c.PNG")]
    for file, name, probability, *shares in lines:
        expected = by_hand(runs / "read" / "student.safetensors", Path(file))
        assert [float(share) for share in shares] == pytest.approx(expected, abs=2e-3)
        assert name == CLASSES[int(np.argmax(expected))] and float(probability) == max(map(float, shares))
    out = tmp_path / "classes.json"
    weights = runs / "read" / "student.safetensors"
    assert said(capsys, "predict", weights, folder / "b.png", folder, "--out", out)[0] == 0
    found = json.loads(out.read_text())
    assert [Path(one["file"]).name for one in found] == ["b.png", "a.jpg", "b.png", "c.PNG"]
    assert [*found[0]["probabilities"]] == CLASSES == read_header(weights)["classes"]
    assert [*found[0]["probabilities"].values()] == pytest.approx(
        by_hand(weights, folder / "b.png"), abs=2e-3
    )
    averaged = said(capsys, "predict", runs / "read", folder / "b.png", "--averaged")[1]
    expected = by_hand(runs / "read" / "averaged.safetensors", folder / "b.png")
    shares = [float(share) for share in averaged.splitlines()[1].split(",")[3:]]
    assert shares == pytest.approx(expected, abs=2e-3)


def test_a_student_that_python_has_saved(runs, tmp_path, capsys):
    run, photographs = runs / "read", tmp_path / "b.png"
    picture(9, (20, 16)).save(photographs)
    student = load_vit(run / "student.safetensors")
    architecture = Architecture(**read_header(run / "student.safetensors")["architecture"])
    silent = save_vit(tmp_path / "silent.safetensors", student, architecture)
    code, printed, wrong = said(capsys, "predict", silent, photographs)
    assert code == 2 and "Augmentation(...).describe()" in wrong and not printed
    says = {"augmentation": read_config(run).augmentation.describe(), "classes": ["x", "y", "z"]}
    saved = save_vit(tmp_path / "saved.safetensors", student, architecture, says)
    code, printed, _ = said(capsys, "predict", saved, photographs)
    header, line = csv.reader(printed.splitlines())
    assert code == 0 and header[3:] == ["x", "y", "z"]
    for column, named in (("class", "'class'"), ("x", "2 names")):  # one column, or one key, for two things
        says["classes"] = ["x", "y", column]
        clash = save_vit(tmp_path / "clash.safetensors", student, architecture, says)
        code, printed, wrong = said(capsys, "predict", clash, photographs)
        assert code == 2 and named in wrong and not printed
    shares = [float(share) for share in line[3:]]
    expected = by_hand(run / "student.safetensors", photographs, binary=False)  # the file says nothing of it
    assert shares == pytest.approx(expected, abs=2e-3)


def test_a_model_that_says_nan_says_no_class(runs, tmp_path, capsys):
    tensors, header = read_tensors(runs / "read" / "student.safetensors")
    tensors["head.bias"][0] = np.nan
    broken = write_tensors(tmp_path / "broken.safetensors", tensors, header)
    picture(0, (20, 16)).save(file := tmp_path / "a.png")
    code, printed, wrong = said(capsys, "predict", broken, file)
    assert code == 2 and str(file) in wrong and not printed


def test_pictures_that_cannot_be_read(runs, tmp_path, capsys):
    good, bad, out = tmp_path / "good.png", tmp_path / "bad.jpg", tmp_path / "classes.csv"
    picture(3).save(good)
    bad.write_bytes(cut_jpeg(1))
    code, _, wrong = said(capsys, "predict", runs / "read", good, bad, "--out", out)
    assert code == 2 and str(bad) in wrong and not out.exists()
    alone = said(capsys, "predict", runs / "read", good)[1]
    code, printed, warned = said(capsys, "predict", runs / "read", bad, good, "--on-corrupt", "skip")
    assert code == 0 and printed == alone and str(bad) in warned and "left out" in warned


# --- the same run again ---


def test_a_run_again_is_the_same_run(runs, tmp_path, capsys):
    assert said(capsys, "train", "--config", runs / "distill", "--out", tmp_path / "same")[0] == 0
    assert read_config(tmp_path / "same") == read_config(runs / "distill")
    weights = [(one / "student.safetensors").read_bytes() for one in (runs / "distill", tmp_path / "same")]
    assert weights[0] == weights[1]
    other = configure_again(runs / "distill" / "config.json", seed=1)
    assert other == replace(read_config(runs / "distill"), seed=1)
    again = configure_again(write_config(tmp_path, other), seed=0)
    assert again == read_config(runs / "distill"), "a seed of 0 is said, too"


def test_a_run_again_on_other_data_reads_these_alone(runs, tmp_path, monkeypatch):
    """The old run's folder and columns of images were read in their place."""
    old = replace(read_config(runs / "read"), data="cifar10", data_path=str(tmp_path), label_column="fine")
    new = write_folders(tmp_path / "new", "train", range(6))
    again = configure_again(write_config(tmp_path, old), data=str(new))
    assert (again.data, again.data_path, again.label_column) == (str(new), None, None)
    monkeypatch.chdir(tmp_path)
    assert configure_again(write_config(tmp_path, old), changes={"data_path": "new"}).data_path == str(new)
