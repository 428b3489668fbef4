"""Runs beside Copy and Distill: what each trains, leaves, and goes on with after it was stopped."""

import re
from dataclasses import replace

import pytest
import torch

from atbook.worlds import marked_glyphs
from atfamily.stored_maps import load_stored_maps
from atlib.attention_transfer import AttentionTransfer
from atlib.baselines import FeatureDistillation, MeanMapCopy
from atlib.checkpoint import load_bundle, load_vit, save_vit
from atlib.evaluate import evaluate
from atlib.loading import seed_for
from atlib.plan import Plan
from atlib.train import train
from atlib.vit import Architecture
from atrun import __main__ as command
from atrun.build import reference_images, training_images
from atrun.config import read_config
from atrun.configure import configure
from atrun.data.catalogue import draw
from atrun.estimate import as_text, assembled, estimate, flops_of, memory_of
from atrun.record import read_record
from atrun.runner import load_result
from atrun.teachers.load import load_teacher
from tests.helpers import randomise, same
from tests.picture_files import write_folders
from tests.stopped_runs import asked, at_step
from tests.stopped_runs import few_held_out as few_held_out  # a fixture

OURS = {"depth": 2, "embed_dim": 16, "num_heads": 2}
SMALL = {f"model.{name}": value for name, value in OURS.items()}


def vit_file(path, seed=0, **other):
    architecture = Architecture("glyphs", {**OURS, "num_classes": 5, **other})
    return save_vit(path, randomise(architecture.build(), seed), architecture)


@pytest.fixture
def teacher(tmp_path):
    return vit_file(tmp_path / "teacher.safetensors")


def run(recipe, out, *more, **settings):
    assert command.main(asked(recipe, out, *map(str, more), **(SMALL | settings))) == 0
    return out


def student(seed=0):
    torch.manual_seed(seed_for(seed, "student"))
    return Architecture("glyphs", {**OURS, "num_classes": 8}).build()


def by_hand(model, folder):
    """The model after the folder's recipe, called from Python."""
    train(model, marked_glyphs(size=20, seed=0), read_config(folder).recipe, progress=None)
    return model


def test_features_are_distilled_and_the_student_is_left_alone(tmp_path, teacher):
    asked_for = {"method": "features", "feature_layers": "[1]"}
    folder = run("find-distill", tmp_path / "run", "--teacher", teacher, **asked_for)
    assert read_config(folder).plan is None
    pair = by_hand(FeatureDistillation(load_teacher(teacher).vit, student(), [1]), folder)
    left = load_vit(folder / "student.safetensors")
    assert same(left.state_dict(), pair.student.state_dict())
    record = read_record(folder / "record.json")
    assert record.method == "features"
    expected = evaluate(left, marked_glyphs(split="test", size=40)).accuracy
    assert record.results["test_accuracy"] == expected


def test_a_mean_map_is_that_of_training_images_and_stays_with_the_student(tmp_path, teacher, capsys):
    asked_for = {"method": "mean-maps", "reference_images": 7, "ema": 0.5}
    folder = run("find-copy", tmp_path / "run", "--teacher", teacher, **asked_for)
    images = marked_glyphs(size=20, seed=0)
    chosen = draw(20, 7, 0, "atbook.worlds:marked_glyphs reference")
    pair = MeanMapCopy(load_teacher(teacher).vit, student(), images.take(chosen)[0])
    by_hand(pair, folder)
    left = load_stored_maps(folder / "student.safetensors")
    state = left.state_dict()
    assert state.keys() == pair.state_dict().keys() and "maps_1" in state
    for name, value in pair.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-6, atol=1e-7)
    capsys.readouterr()
    for more in ([], ["--averaged"]):
        assert command.main(["evaluate", str(folder), *more]) == 0
        name = "averaged" if more else "student"
        model = load_result(folder / f"{name}.safetensors")
        expected = evaluate(model, marked_glyphs(split="test", size=40))
        printed = capsys.readouterr().out
        assert f"{100 * expected.accuracy:.2f} % of 40 images, loss {expected.loss:.4f}" in printed
    with pytest.raises(ValueError):  # its student alone is another function
        load_teacher(folder / "student.safetensors")


def test_a_mean_map_is_of_the_images_that_are_trained_on_and_no_others(tmp_path, teacher):
    data = str(write_folders(tmp_path / "images", "train", range(30)))
    of = {"method": "mean-maps", "data_size": "6", "batch_size": "2"}
    config = configure("copy", data, str(teacher), of)
    trained_on = training_images(config)
    seen = torch.cat([*reference_images(config)])
    assert len(trained_on) == 6 and torch.equal(seen, trained_on.take(range(6))[0])


@pytest.mark.parametrize("how", ["copy", "distill"])
def test_an_untrained_teacher_hangs_on_the_seed_alone_and_is_kept(tmp_path, how):
    folder = run(f"find-{how}", tmp_path / "run", "--teacher", "untrained", "--seed", 3, drop_path=0.1)
    torch.manual_seed(seed_for(3, "untrained"))
    twin = Architecture("glyphs", {**OURS, "num_classes": 0}).build()
    stored = load_teacher(folder / "teacher.safetensors")
    assert same(stored.vit.state_dict(), twin.state_dict())
    assert stored.architecture.overrides == {**OURS, "num_classes": 0}
    if how == "copy":
        kept = load_bundle(folder / "student.safetensors")
        assert same(kept.teacher.state_dict(), twin.state_dict())
        assert not torch.equal(kept.student.blocks[0].attn.qkv.weight, twin.blocks[0].attn.qkv.weight)
    else:
        config = read_config(folder)
        torch.manual_seed(seed_for(3, "student"))
        learner = config.architecture(8).build()
        pair = AttentionTransfer(twin, learner, Plan(how="distill"))
        train(pair, marked_glyphs(size=20, seed=3), config.recipe, seed=3, progress=None)
        assert same(load_vit(folder / "student.safetensors").state_dict(), learner.state_dict())


def test_a_student_begins_with_weights_of_its_own(tmp_path, teacher):
    start = vit_file(tmp_path / "start.safetensors", seed=1, global_pool="avg")
    still = {"lr": 1e-12, "weight_decay": 0, "layer_decay": "none"}
    folder = run("find-copy", tmp_path / "run", "--teacher", teacher, student_weights=start, **still)
    found = load_result(folder / "student.safetensors").student.state_dict()
    begun = load_vit(start).state_dict()
    body = [name for name in begun if not name.startswith(("head", "norm", "fc_norm"))]
    assert len(body) > 20
    assert all(torch.allclose(found[name], begun[name], rtol=0, atol=1e-9) for name in body)
    assert found["head.weight"].shape == (8, 16)
    assert read_config(folder).student_weights == str(start)


@pytest.mark.parametrize(
    "other, named", [({"num_heads": 4}, "in heads"), ({"act_layer": "gelu_tanh"}, "activation")]
)
def test_weights_that_the_student_cannot_begin_with(tmp_path, teacher, capsys, other, named):
    start = vit_file(tmp_path / "start.safetensors", seed=1, **other)
    words = asked("find-copy", tmp_path / "no", "--teacher", str(teacher), **SMALL, student_weights=start)
    assert command.main(words) == 2
    assert re.search(named, error := capsys.readouterr().err), error
    assert not (tmp_path / "no" / "config.json").exists()


STOPPED = {
    "mean maps": ("find-copy", {"method": "mean-maps", "reference_images": 5}),
    "untrained": ("find-distill", {}),
}


@pytest.mark.parametrize("name", STOPPED)
def test_interrupted_it_goes_on_to_the_same_bits(tmp_path, teacher, monkeypatch, name, capsys):
    recipe, options = STOPPED[name]
    words = ["--teacher", "untrained" if name == "untrained" else teacher]
    whole = run(recipe, tmp_path / "whole", *words, **options)
    out = tmp_path / "stopped"
    with monkeypatch.context() as patch:
        at_step(3, KeyboardInterrupt(), patch)
        assert command.main(asked(recipe, out, *map(str, words), **(SMALL | options))) == 130
    err = capsys.readouterr().err
    assert f"python -m atlib resume {out}\n" in err and "Traceback" not in err
    if name == "untrained":  # another teacher in its place is found; without one it is made again
        kept = (out / "teacher.safetensors").read_bytes()
        vit_file(out / "teacher.safetensors", seed=5, num_classes=0)
        assert command.main(["resume", str(out)]) == 2
        assert "teacher's sha256" in capsys.readouterr().err
        (out / "teacher.safetensors").unlink()
    assert command.main(["resume", str(out)]) == 0
    left = [load_result(folder / "student.safetensors").state_dict() for folder in (whole, out)]
    assert same(*left)
    if name == "untrained":
        assert (out / "teacher.safetensors").read_bytes() == kept


def test_features_without_labels_reach_a_student_with_weights_of_its_own(tmp_path, teacher):
    start = vit_file(tmp_path / "start.safetensors", seed=1)
    of = {f"model.{name}": str(OURS[name]) for name in OURS}
    of |= {"method": "features-unlabelled", "student_weights": str(start)}
    features = configure("find-distill", "atbook.worlds:marked_glyphs", str(teacher), of).on(64)
    text = as_text(estimate(features, 64, 8))
    assert f", teacher {teacher}, the student starts from {start}" in text


def test_a_dry_run_counts_features_and_mean_maps():
    """Whole blocks of the teacher for features; no teacher beside stored maps."""
    data, of = "atbook.worlds:marked_glyphs", {f"model.{name}": str(OURS[name]) for name in OURS}
    features = configure("find-distill", data, "untrained", of | {"method": "features"}).on(64)
    first = replace(features, feature_layers=(0,))
    mean = configure("find-copy", data, "untrained", of | {"method": "mean-maps"}).on(64)
    scratch = configure("find-scratch", data, None, of).on(64)
    skeleton = features.skeleton(8)
    plain, all_layers, one_layer = (flops_of(each, skeleton) for each in (scratch, features, first))
    N, D = 17, 16
    block = 2 * (12 * N * D * D + 2 * N * N * D)
    assert all_layers - one_layer == block and one_layer - plain == block + 2 * 16 * (8 * 8 * 3) * D
    assert flops_of(mean, skeleton) is None
    weights = [memory_of(each, 8).teacher for each in (scratch, features, mean)]
    headless = 4 * sum(p.numel() for p in skeleton.parameters())
    assert weights[0] == weights[2] == 0 and weights[1] == headless
    assert assembled(mean, 8).maps_1.shape == (1, 2, 17, 17)
    text = as_text(estimate(features, 64, 8))
    assert "features, teacher untrained, seed 0" in text and "taken to be" not in text
