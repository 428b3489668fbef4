"""The command line of a run, end to end: what it leaves, that it goes on when stopped, what it refuses."""

import shutil
import signal
from dataclasses import replace

import datasets
import pytest
import timm
import torch
from safetensors.torch import load_file

from atbook.worlds import marked_glyphs
from atfamily.measures.controls import controls_table, switched
from atlib.attention_transfer import AttentionTransfer
from atlib.checkpoint import load_bundle, load_vit, save_vit
from atlib.evaluate import evaluate
from atlib.loading import seed_for
from atlib.plan import Plan
from atlib.train import train
from atlib.vit import Architecture, create_classifier, create_vit
from atrun import __main__ as command
from atrun import commands, runner
from atrun.build import build, held_out, training_images
from atrun.config import read_config, write_config
from atrun.configure import configure
from atrun.log import read_log
from atrun.record import read_record
from atrun.runner import load_result, weights_of
from tests import stopped_runs
from tests.helpers import in_a_fork, made_once, randomise, same
from tests.picture_files import write_folders, write_parquet
from tests.run import photographs
from tests.stopped_runs import asked, at_step, sets
from tests.stopped_runs import few_held_out as few_held_out  # a fixture


@pytest.fixture
def teacher(tmp_path):
    """The path of a teacher with weights at which its maps matter, and the teacher itself."""
    architecture = Architecture("glyphs", {"num_classes": 192})
    vit = randomise(architecture.build())
    return save_vit(tmp_path / "teacher.safetensors", vit, architecture), vit.eval()


def weights(folder):
    return load_file(folder / "student.safetensors")


def test_a_run_is_what_train_does_and_leaves_weights_record_config_and_log(tmp_path, capsys):
    out = tmp_path / "run"
    assert command.main(asked("find-scratch", out, "--seed", "3", lr=1e-3, evaluate_every=1)) == 0
    printed = capsys.readouterr().out

    torch.manual_seed(seed_for(3, "student"))
    vit = Architecture("glyphs", {"num_classes": 8}).build()
    recipe = read_config(out).recipe
    assert (recipe.steps, recipe.batch_size, recipe.lr) == (5, 8, 1e-3)
    history = train(vit, marked_glyphs(size=20, seed=3), recipe, seed=3, progress=None)
    student = load_vit(out / "student.safetensors")
    assert same(student.state_dict(), vit.state_dict())

    record = read_record(out / "record.json")
    test = marked_glyphs(split="test", size=40)
    accuracy = record.results["test_accuracy"]
    assert accuracy == evaluate(vit, test).accuracy and f"test_accuracy {accuracy:.4g}" in printed
    assert (record.experiment, record.method, record.seed) == ("train", "scratch", 3)
    assert record.config == read_config(out).describe() and record.seconds > 0
    assert [entry["loss"] for entry in record.history] == [entry["loss"] for entry in history]
    log = read_log(out)
    assert [entry["step"] for entry in log if entry["event"] == "step"] == [1, 2, 3, 4, 5]
    assert [entry["step"] for entry in log if "test_accuracy" in entry] == [3, 5]
    assert len((out / "log.txt").read_text().splitlines()) == len(log)
    assert str(out / "student.safetensors") in printed and str(out / "record.json") in printed


def test_copy_keeps_its_teacher_and_distill_does_not(tmp_path, teacher, capsys):
    path, vit = teacher
    images = marked_glyphs(split="test", size=40)
    for how in ("copy", "distill"):
        out = tmp_path / how
        assert command.main(asked(f"find-{how}", out, "--teacher", str(path), ema=0.5)) == 0
        assert ("teacher in the same file" in capsys.readouterr().out) == (how == "copy")
        torch.manual_seed(seed_for(0, "student"))
        pair = AttentionTransfer(vit, Architecture("glyphs", {"num_classes": 8}).build(), Plan(how=how))
        average = Architecture("glyphs", {"num_classes": 8}).build()
        recipe = read_config(out).recipe
        train(pair, marked_glyphs(size=20, seed=0), recipe, progress=None, average_into=average)
        read = load_bundle if how == "copy" else load_vit
        kept, averaged = (read(out / f"{name}.safetensors") for name in ("student", "averaged"))
        assert same(getattr(kept, "student", kept).state_dict(), pair.student.state_dict())
        assert same(getattr(averaged, "student", averaged).state_dict(), average.state_dict())
        expected = evaluate(pair if how == "copy" else pair.student, images).accuracy
        assert read_record(out / "record.json").results["test_accuracy"] == expected
        assert command.main(["evaluate", str(out), "--averaged"]) == 0
        expected = evaluate(AttentionTransfer(vit, average, Plan()) if how == "copy" else average, images)
        printed = capsys.readouterr().out
        assert f"{out}/averaged.safetensors on atbook.worlds:marked_glyphs, test: " in printed
        assert f"{100 * expected.accuracy:.2f} % of 40 images, loss {expected.loss:.4f}" in printed


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The folder of the runs that were stopped, and how each command ended."""

    def stop_runs(folder):
        ended = in_a_fork(folder, stopped_runs.main, folder, CUDA_VISIBLE_DEVICES="")
        assert ended.code == 0, ended.said
        return ended.returned

    return made_once(tmp_path_factory, "stopped", stop_runs)


def logged(folder):
    return [entry["step"] for entry in read_log(folder) if entry["event"] == "step"]


@pytest.mark.slow
# before the first checkpoint, at a checkpoint, after the last step
@pytest.mark.parametrize("step", [1, 4, 5])
def test_killed_at_a_step_it_goes_on_to_the_same_bits(stopped, step):
    folder, ended = stopped
    whole, out = folder / "whole", folder / f"killed-{step}"
    assert ended["whole"] == [0] and ended[out.name] == [-signal.SIGKILL, *([2] if step == 4 else []), 0]
    assert step != 4 or "drop_path was 0.2" in (folder / f"{out.name}.txt").read_text()
    assert same(weights(out), weights(whole))
    assert logged(out) == logged(whole) == [1, 2, 3, 4, 5]
    assert read_record(out / "record.json").results == read_record(whole / "record.json").results
    losses = [[entry["loss"] for entry in read_log(each)] for each in (out, whole)]
    assert losses[0] == losses[1]


def test_a_finished_run_without_its_weights_writes_them_again(tmp_path, capsys):
    """Both files from the last checkpoint; without checkpoints the average by training again."""
    out = tmp_path / "run"
    assert command.main(asked("find-scratch", out, ema=0.5)) == 0
    files = [out / "student.safetensors", out / "averaged.safetensors"]
    before, results = [load_file(path) for path in files], read_record(out / "record.json").results
    for lost in (files, files[1:]):
        for path in lost:
            path.unlink()
        assert command.main(["evaluate", str(out), "--averaged"]) == 2
        assert command.main(["resume", str(out)]) == 0
        assert all(same(load_file(path), weights) for path, weights in zip(files, before))
        assert read_record(out / "record.json").results == results
        shutil.rmtree(out / "checkpoints")


@pytest.mark.parametrize(
    "left", ["checkpoints/step-00000003/facts.json", "record.json", "teacher.safetensors", "log.jsonl"]
)
def test_what_is_left_of_a_run_without_its_config_is_not_written_over(tmp_path, left):
    (tmp_path / left).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / left).write_text("here")
    with pytest.raises(ValueError, match="/".join(left.split("/")[:2])):
        runner.check_folder(tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / left]


def test_a_folder_with_a_run_is_left_alone(tmp_path, capsys, monkeypatch):
    out = tmp_path / "run"
    before = write_config(out, configure("find-scratch", "atbook.worlds:marked_glyphs")).read_bytes()
    monkeypatch.setattr(commands, "training_images", lambda config: pytest.fail("data were touched"))
    assert command.main(asked("find-scratch", out, lr=1)) == 2
    assert f"`python -m atlib resume {out}`" in capsys.readouterr().err
    assert (out / "config.json").read_bytes() == before


def test_pretraining_makes_a_teacher(tmp_path, capsys):
    teacher = str(tmp_path / "mae" / "teacher.safetensors")
    options = sets(decoder_width=16, model="glyphs", training_split="unlabelled")
    asked_for = ["pretrain", "mae", "--data", "atbook.worlds:marked_glyphs", "--out", str(tmp_path / "mae")]
    assert command.main([*asked_for, *options]) == 0
    assert load_vit(teacher).num_classes == 0
    assert set(read_record(tmp_path / "mae" / "record.json").results) == {"loss"}
    assert command.main(asked("find-copy", tmp_path / "after", "--teacher", teacher)) == 0
    assert configure("find-copy", "atbook.worlds:marked_glyphs", str(tmp_path / "mae")).teacher == teacher
    assert command.main(["evaluate", str(tmp_path / "mae")]) == 2
    assert "without a class head" in capsys.readouterr().err
    assert command.main(["teacher", teacher]) == 0 and "17" in capsys.readouterr().out


def test_simmim_makes_a_teacher(tmp_path):
    """MoCo-v3 and DINO do in test_recipes_run.py."""
    options = sets(model="glyphs", training_split="unlabelled", mask_unit=2)
    asked_for = ["pretrain", "simmim", "--data", "atbook.worlds:marked_glyphs", "--out", str(tmp_path)]
    assert command.main([*asked_for, *options]) == 0
    assert load_vit(tmp_path / "teacher.safetensors").num_classes == 0
    assert set(read_record(tmp_path / "record.json").results) == {"loss"}
    built = build(read_config(tmp_path), 0).model
    assert (built.unit, built.hidden) == (2, 3), "0.6 of 2 x 2 squares"


def test_an_evaluation_that_holds_all_that_is_trained_on_is_said(tmp_path, capsys):
    data = write_folders(tmp_path / "images", "train", range(30))
    for split in ("evaluation_split", "training_split"):
        request = photographs.asked(data, tmp_path / split, f"{split}=train+validation")
        assert command.main([*request, "--epochs", "1", "--warmup_epochs", "0"]) == 0
        assert "'train+validation'" in capsys.readouterr().err


def test_a_corrupt_image_of_the_evaluation_does_not_end_a_run_for_good(tmp_path, capsys):
    data = write_folders(tmp_path / "images", "train", range(21))
    write_folders(data, "validation", range(21, 25), corrupt=[23])
    out, whole = tmp_path / "run", tmp_path / "whole"
    assert command.main([*photographs.asked(data, out, "save_every=2"), "--on-corrupt", "raise"]) == 2
    assert "--on-corrupt skip" in capsys.readouterr().err
    started = read_config(out)
    assert command.main(["resume", str(out)]) == 2
    assert read_config(out) == started and not (out / "record.json").exists()
    assert command.main(["resume", str(out), "--on-corrupt", "skip"]) == 0
    assert read_config(out) == replace(started, on_corrupt="skip")
    results = read_record(out / "record.json").results
    assert "validation_accuracy" in results and results["validation_images"] == 3
    assert command.main(photographs.asked(data, whole, "save_every=2")) == 0
    assert same(weights(out), weights(whole)) and read_record(whole / "record.json").results == results
    capsys.readouterr()
    assert command.main(["resume", str(out), "--on-corrupt", "raise"]) == 0
    assert "is finished" in capsys.readouterr().out
    assert read_config(out).on_corrupt == "skip", "a finished run is not touched"


def test_a_stream_is_trained_on_stopped_and_gone_on_with(tmp_path, capsys, monkeypatch):
    """Stopped in the middle of the second epoch, it ends with the bits of the run that was not."""
    # it sleeps for 5 seconds after parquet files
    monkeypatch.setattr(datasets.iterable_dataset.time, "sleep", lambda seconds: None)
    for split, indices, parts in (("train", range(21), 3), ("validation", range(21, 30), 1)):
        write_parquet(tmp_path / "pictures", split, indices, parts=parts)

    def request(out, *changes):
        given = ("streaming=true", "save_every=100", *changes)
        return photographs.asked(tmp_path / "pictures", tmp_path / out, *given)

    assert command.main(request("whole")) == 0
    with monkeypatch.context() as changed:
        at_step(4, signal.SIGTERM, changed)  # noticed in the next step
        assert command.main(request("stopped")) == 75
    assert command.main(["resume", str(tmp_path / "stopped")]) == 0
    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    assert logged(stopped) == [1, 2, 3, 4, 5, 6] and read_config(stopped).streaming
    assert same(weights(stopped), weights(whole))
    assert read_record(stopped / "record.json").results == read_record(whole / "record.json").results
    capsys.readouterr()
    assert command.main(request("part", "data_size=10")) == 2
    assert "21 images, not 10" in capsys.readouterr().err and not (tmp_path / "part").exists()


# --- A classifier that is no ViT


WORLD = "atbook.worlds:marked_glyphs"


def test_a_resnet_is_timms_own_model():
    torch.manual_seed(3)
    expected = timm.create_model("resnet18", num_classes=5)
    torch.manual_seed(3)
    assert same(create_classifier("resnet18", num_classes=5, img_size=32).state_dict(), expected.state_dict())
    with pytest.raises(ValueError, match="ResNet"):
        create_vit("resnet18")


def test_it_is_trained_and_kept(tmp_path, capsys):
    asked = f"train --recipe scratch --model resnet18 --model.stem_width 8 --data {WORLD} --out {tmp_path}"
    assert command.main([*asked.split(), *"--steps 2 --batch_size 8 --data_size 32".split()]) == 0
    kept = load_vit(tmp_path / "student.safetensors")
    assert type(kept) is timm.models.ResNet and kept.num_classes == 8
    capsys.readouterr()
    assert command.main(["evaluate", str(tmp_path)]) == 0
    assert "accuracy" in capsys.readouterr().out


# --- A table of a run's controls


TEACHER = "results/transfer/find/teacher-seed0.safetensors"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run of Copy."""

    def make(folder):
        assert command.main(asked("find-copy", folder / "copy", "--teacher", TEACHER)) == 0

    return made_once(tmp_path_factory, "run-with-controls", make)[0] / "copy"


def test_maps_of_a_finished_student_are_switched(run, capsys):
    assert command.main(["controls", str(run)]) == 0
    config = read_config(run)
    rows = switched(load_result(weights_of(run)), held_out(config), training_images(config))
    assert capsys.readouterr().out.strip() == controls_table(rows)


def test_students_are_trained_under_each_control(run, capsys):
    assert command.main(["controls", str(run), "--train", "--seeds", "1"]) == 0
    table = capsys.readouterr().out.strip().splitlines()
    names = ["scratch", "own maps", "jigsaw", "mean map", "blank"]
    assert [line.split("|")[1].strip() for line in table[2:]] == names
