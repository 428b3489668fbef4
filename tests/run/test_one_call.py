"""One call from a teacher and photographs to a student, and the table of several methods."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from atfamily.measures.predictions import paired_bootstrap
from atlib import create_vit, transfer
from atlib.evaluate import predict
from atlib.pair import Normalisation
from atrun import __main__ as command
from atrun import estimate, one_call
from atrun.build import held_out_images
from atrun.config import read_config
from atrun.one_call import compare_methods, is_flat
from atrun.record import read_record
from atrun.runner import load_result
from tests.helpers import same
from tests.picture_files import picture
from tests.run.test_generic import photographs as photographs  # a fixture
from tests.run.test_generic import teacher_file

FEW = {"epochs": "1", "lr": "1e-4"}


@pytest.fixture(autouse=True)
def no_report(monkeypatch):
    """A run's page takes seconds, and has tests of its own (test_report.py)."""
    monkeypatch.setattr(one_call, "run_report", lambda folder, *given: folder)


def test_one_call_is_the_command_and_is_read_again_for_the_same_images_alone(tmp_path, photographs, capsys):
    teacher = teacher_file(tmp_path / "teacher.safetensors", Normalisation(0.5, 0.25))
    found = transfer(teacher, photographs, "half", out=tmp_path / "called", settings=FEW)
    assert "--plan.layers {0: 1, 1: 3}" in capsys.readouterr().err
    assert (found.student.embed_dim, len(found.student.blocks), found.student.num_classes) == (24, 2, 3)
    assert not found.student.training and found.record == read_record(found.folder / "record.json")
    assert f"validation_accuracy {found.record.results['validation_accuracy']:.4g}" in found.report
    asked = f"--teacher {teacher} --data {photographs} --student half --epochs 1 --lr 1e-4".split()
    assert command.main(["transfer", *asked, "--out", str(tmp_path / "asked")]) == 0
    assert read_config(tmp_path / "asked") == read_config(found.folder)
    weights = load_result(tmp_path / "asked" / "student.safetensors").state_dict()
    assert same(weights, found.student.state_dict())
    # what is finished is read again, and not shown for other images
    again = partial(transfer, teacher, photographs, "half", out=tmp_path / "called", settings=FEW)
    data = Path(photographs)
    (tested, *_) = sorted((data / "validation").rglob("*.png"))
    other = tested.rename(tested.with_name("another.png"))
    with pytest.raises(ValueError):
        again()
    other.rename(tested)
    assert again().record == found.record
    for split in ("train", "validation"):
        (data / split / "dog").rename(data / split / "dog-as-well")
    with pytest.raises(ValueError):
        again()


def test_a_run_goes_on_and_is_not_mixed_with_another(tmp_path, photographs):
    teacher = create_vit("glyphs", depth=2)
    asked = {"out": tmp_path / "run", "settings": FEW}
    found = transfer(teacher, photographs, "half", **asked)
    (found.folder / "record.json").unlink()
    again = transfer(teacher, photographs, "half", **asked)
    assert again.record.results == found.record.results and found.student.embed_dim == 32
    with pytest.raises(ValueError, match="another run"):
        transfer(teacher, photographs, "half", "features", **asked)
    with pytest.raises(ValueError, match="has changed since"):
        transfer(create_vit("glyphs", depth=2), photographs, "half", **asked)


def test_under_a_launcher_it_is_refused(tmp_path, photographs, monkeypatch):
    """A second process read the student before the first had written it."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="train --recipe distill"):
        transfer(create_vit("glyphs", depth=2), photographs, "half", out=tmp_path / "v1.2", settings=FEW)
    assert [path.name for path in tmp_path.glob("v1*")] == ["v1.2-teacher.safetensors"], "a name with a dot"


def test_a_finished_run_of_an_untrained_teacher_is_read_again(tmp_path, photographs):
    asked = {"out": tmp_path / "run", "settings": FEW | {"model": "glyphs", "model.depth": "2"}}
    first, again = (transfer("untrained", photographs, None, "copy", **asked) for _ in range(2))
    assert first.record == again.record


def test_the_table_of_methods(tmp_path, photographs, capsys):
    """Each number of the table again, from the weights that the runs have left."""
    teacher = teacher_file(tmp_path / "teacher.safetensors", Normalisation(0.5, 0.25))
    methods = ["logits", "copy"]
    asked = ["--teacher", teacher, "--data", photographs, "--student", "half", "--methods", *methods]
    out = tmp_path / "table"
    words = ["transfer", *asked, "--seeds", "2", "--out", str(out), "--epochs", "1", "--lr", "3e-3"]
    assert command.main(words) == 0
    said = capsys.readouterr()
    assert f"in {out / 'teacher'}" in said.err
    table = json.loads((out / "table.json").read_text())
    assert table["images"] == 6 and list(table["methods"]) == methods
    answers = {}
    for name, row in table["methods"].items():
        right = []
        for seed, folder in enumerate(map(Path, row["folders"])):
            config = read_config(folder)
            assert (config.method, config.seed, config.model.overrides["embed_dim"]) == (name, seed, 24)
            images = held_out_images(photographs, "validation", config.augmentation)
            model = load_result(folder / "student.safetensors")
            right.append(predict(model, images).argmax(1) == images.targets)
            record = read_record(folder / "record.json")
            accuracy = right[-1].double().mean()
            assert row["accuracies"][seed] == record.results["validation_accuracy"] == accuracy
            assert row["seconds"][seed] == record.seconds
        answers[name] = torch.stack(right)
    (entry,) = table["differences"]
    first, second = answers[entry["first"]], answers[entry["second"]]
    assert (entry["mean"], entry["low"], entry["high"]) == tuple(paired_bootstrap(first, second))
    assert entry["mean"] == pytest.approx((first.double().mean() - second.double().mean()).item())
    tuned = read_config(out / "teacher")
    assert tuned.method == "fine-tune"
    assert read_config(out / "logits-0").teacher.startswith(str(out / "teacher"))
    assert read_config(out / "copy-0").teacher == teacher
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.safetensors")}
    assert command.main(words) == 0, "what is finished is only read"
    assert before == {path: path.stat().st_mtime_ns for path in out.rglob("*.safetensors")}
    assert json.loads((out / "table.json").read_text()) == table


def test_a_flat_folder_needs_no_labels(tmp_path, photographs, capsys):
    flat = tmp_path / "flat"
    (flat / "train").mkdir(parents=True)
    for index in range(16):
        picture(index).save(flat / "train" / f"{index}.png")
    assert is_flat(flat) and is_flat(flat / "train") and not is_flat(photographs) and not is_flat("cifar10")
    teacher = teacher_file(tmp_path / "teacher.safetensors", Normalisation(0.5, 0.25))
    found = transfer(teacher, flat, "half", out=tmp_path / "run", settings=FEW)
    assert found.record.method == "distill-unlabelled" and found.student.num_classes == 0
    for method in ("scratch", "copy", "logits"):
        with pytest.raises(ValueError, match="labels"):
            transfer(teacher, flat, "half", method, out=tmp_path / "other", settings=FEW)
    with pytest.raises(ValueError, match="labels"):
        compare_methods(teacher, flat, ["distill"], out=tmp_path / "other")


def test_a_dry_run_says_student_pairs_and_cost_and_trains_nothing(tmp_path, photographs, monkeypatch, capsys):
    teacher = teacher_file(tmp_path / "teacher.safetensors", Normalisation(0.5, 0.25))
    monkeypatch.setattr(one_call, "start", None)
    monkeypatch.setattr(estimate, "time_steps", lambda *arguments: None)
    before = set(tmp_path.rglob("*"))
    asked = ["transfer", "--teacher", teacher, "--data", photographs, "--student", "half", "--methods"]
    assert command.main([*asked, "distill", "logits", "--seeds", "3", "--dry-run", "--epochs", "1"]) == 0
    said = capsys.readouterr()
    assert "2 layers of width 24" in said.out and "0 from 1, 1 from 3" in said.out
    assert said.out.count("FLOPs in all") == 2 and "3 runs of each" in said.out
    assert "fine-tune: fine-tune" in said.out, "of logits first what makes the teacher's classes"
    assert "--plan.unequal_heads aggregate" in said.err and set(tmp_path.rglob("*")) == before
    assert command.main([*asked, "distill"]) == 2, "otherwise it needs --out"
