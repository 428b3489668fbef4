"""`python -m atlib evaluate` on photographs: read as asked, prepared as the weights were trained, and what
was left out is said."""

import re
import shutil

import datasets
import pytest

from atlib import __main__ as command
from atlib.checkpoint import load_vit, read_header, save_vit
from atlib.data.catalogue import CATALOGUE
from atlib.data.photos import open_photos
from atlib.data.transforms import Augmentation
from atlib.record import read_record
from atlib.run import runner
from atlib.run.config import read_config
from atlib.train.evaluate import evaluate
from atlib.vit import Architecture
from tests.helpers import randomise
from tests.picture_files import write_folders, write_parquet

TINY = [
    "model=vit_tiny_patch16_224",
    "model.patch_size=8",
    "model.embed_dim=24",
    "model.depth=2",
    "augmentation.image_size=16",
    "batch_size=8",
    "epochs=2",
    "warmup_epochs=1",
    "augmentation.mean=[0.3,0.4,0.5]",
    "augmentation.crop_pct=1",
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    datasets.disable_progress_bars()


def sets(*changes):
    return [f"--{each}" for each in changes]


def trained(data, out, *changes):
    assert (
        command.main(
            [
                "train",
                "--recipe",
                "mae-scratch-vit-base",
                "--data",
                str(data),
                "--out",
                str(out),
                *sets(*TINY, *changes),
            ]
        )
        == 0
    )
    return out


def vit_file(path, more=None, num_classes=3):
    architecture = Architecture(
        "vit_tiny_patch16_224",
        {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_classes": num_classes},
    )
    return save_vit(path, randomise(architecture.build()), architecture, more or {})


def said(capsys, *words):
    """(exit code, accuracy, images, loss, all that was printed) of an evaluation."""
    capsys.readouterr()
    code = command.main(["evaluate", *map(str, words)])
    out, err = capsys.readouterr()
    found = re.search(r"accuracy ([\d.]+) % of ([\d,]+) images.*, loss ([\d.]+)", out)
    return code, *(found.groups() if found else (None,) * 3), out + err


def test_moved_weights_see_the_images_as_their_run_did(tmp_path, capsys):
    data = write_folders(write_folders(tmp_path / "images", "train", range(12)), "validation", range(12, 20))
    run = trained(data, tmp_path / "run", "ema=0.5")
    expected = read_record(run / "record.json").results
    here = said(capsys, run)
    assert here[1:4] == (
        f"{100 * expected['validation_accuracy']:.2f}",
        "8",
        f"{expected['validation_loss']:.4f}",
    )
    for name in ("student", "averaged"):
        assert (
            read_header(run / f"{name}.safetensors")["augmentation"]
            == read_config(run).describe()["augmentation"]
        )
    (tmp_path / "elsewhere").mkdir()
    moved = shutil.copy(run / "student.safetensors", tmp_path / "elsewhere" / "any.safetensors")
    there = said(capsys, moved, "--data", data)
    assert there[:4] == here[:4] and "does not say" not in there[4]
    assert said(capsys, run / "student.safetensors", "--data", data)[:4] == here[:4]

    # as files were before they said it
    vit, silent = (load_vit(moved), tmp_path / "elsewhere" / "silent.safetensors")
    save_vit(silent, vit, Architecture(**read_header(moved)["architecture"]))
    guessed = said(capsys, silent, "--data", data)
    assert guessed[0] == 0 and guessed[3] != here[3]
    assert (
        "does not say how images were prepared for it; here they were taken at 16 pixels, crop 0.875, mean"
        " (0.485, 0.456, 0.406)" in guessed[4]
    )


def test_weights_of_images_that_were_taken_as_they_are(tmp_path, capsys):
    data = write_parquet(tmp_path / "images", "validation", range(8))
    weights = vit_file(tmp_path / "vit.safetensors", {"augmentation": None})
    code, *_, text = said(capsys, weights, "--data", data)
    assert (
        code == 2
        and "come as 12 x 16 pixels, and the model takes 16 x 16: evaluate it on images of the size" in text
    )
    assert "come as 32 x 32 pixels" in said(capsys, weights, "--data", "marked-glyphs")[4]
    prepared = vit_file(
        tmp_path / "prepared.safetensors",
        {"augmentation": {"image_size": 16, "crop_pct": 1.0, "mean": [0.5] * 3, "std": [0.25] * 3}},
    )
    assert said(capsys, prepared, "--data", data)[0] == 0


def test_data_are_read_as_asked(tmp_path, capsys):
    weights = vit_file(tmp_path / "vit.safetensors")
    data = write_parquet(
        tmp_path / "images", "validation", range(9), image_column="pix", label_column="y", corrupt=(2, 5)
    )
    columns = sets("image_column=pix", "label_column=y")
    code, *_, text = said(capsys, weights, "--data", data)
    assert code == 2 and "--image_column NAME" in text
    code, *_, text = said(capsys, weights, "--data", data, *sets("image_column=y", "label_column=pix"))
    assert code == 2 and "images are in pix, labels may be in y" in text
    code, *_, text = said(capsys, weights, "--data", data, *columns)
    assert code == 2 and "image 2 cannot be decoded" in text and "--on_corrupt skip" in text
    code, accuracy, count, loss, text = said(
        capsys, weights, "--data", data, *columns, *sets("on_corrupt=skip", "workers=1")
    )
    assert "image 2 cannot be decoded and is left out" in text and "image 5 cannot" in text
    with pytest.warns(UserWarning):
        left = open_photos(
            data,
            split="validation",
            train=False,
            augmentation=Augmentation(16),
            image_column="pix",
            label_column="y",
        ).readable()
    expected = evaluate(load_vit(weights), left)
    assert (code, accuracy, count, loss) == (0, f"{100 * expected.accuracy:.2f}", "7", f"{expected.loss:.4f}")
    assert "of 7 images (without 2 that cannot be decoded)" in text


def test_a_run_is_evaluated_on_its_data_at_another_place(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(
        CATALOGUE,
        "imagenet-1k",
        CATALOGUE["imagenet-1k"]._replace(classes=3, images={"train": 12, "validation": 6}),
    )
    data = write_folders(write_folders(tmp_path / "images", "train", range(12)), "val", range(12, 18))
    run = trained("imagenet-1k", tmp_path / "run", f"data_path={data}")
    here = said(capsys, run)
    assert here[0] == 0 and here[2] == "6"
    data.rename(tmp_path / "moved")
    code, *_, text = said(capsys, run)
    assert code == 2 and f"{data} does not exist" in text and "--data_path FOLDER" in text
    assert said(capsys, run, *sets(f"data_path={tmp_path / 'moved'}"))[1:4] == here[1:4]
    assert (
        said(
            capsys,
            run / "student.safetensors",
            "--data",
            "imagenet-1k",
            *sets(f"data_path={tmp_path / 'moved'}"),
        )[1:4]
        == here[1:4]
    )


@pytest.mark.parametrize(
    "changes, says",
    [
        (["lr=1"], "unknown setting --lr"),
        (["workers=many"], "--workers many: the value is int"),
        (["image_column"], "--image_column has no value"),
        (
            ["image_column=x"],
            "would change nothing: it belongs to data that are read, and marked-glyphs is generated",
        ),
    ],
)
def test_what_cannot_be_meant_is_said(tmp_path, capsys, changes, says):
    architecture = Architecture("glyphs", {"num_classes": 8})
    path = save_vit(tmp_path / "vit.safetensors", architecture.build(), architecture)
    code, *_, text = said(capsys, path, "--data", "marked-glyphs", *sets(*changes))
    assert code == 2 and says in text


def test_labels_beyond_the_models_classes(tmp_path, capsys):
    data = write_parquet(tmp_path / "images", "validation", range(9))
    code, *_, text = said(capsys, vit_file(tmp_path / "vit.safetensors", num_classes=2), "--data", data)
    assert (
        code == 2
        and "the model has only 2 outputs" in text
        and "evaluate on data with the classes that it was trained for" in text
    )


def test_a_record_says_on_how_many_images_and_which_were_corrupt(tmp_path, capsys):
    data = write_folders(
        write_folders(tmp_path / "images", "train", range(12), corrupt=(4,)),
        "validation",
        range(12, 20),
        corrupt=(13, 16),
    )
    whole = write_folders(write_folders(tmp_path / "whole", "train", range(12)), "validation", range(12, 20))
    record = read_record(
        runner.record_path(trained(data, tmp_path / "run", "on_corrupt=skip", "evaluate_every=1"))
    )
    out, err = capsys.readouterr()
    assert all(
        f"{name}.png)" in err for name in ("train/dog/004", "validation/dog/013", "validation/dog/016")
    )
    place = sorted(range(12), key=lambda index: (index % 3, index)).index(4)  # folder by folder
    assert [
        (entry["corrupt"], entry["corrupt_indices"], entry["validation_images"]) for entry in record.history
    ] == [(1, [place], 6)] * 2
    assert record.results["validation_images"] == 6 and "validation_images 6" in out
    assert "% of 6 images (without 2 that cannot be decoded)" in said(capsys, tmp_path / "run")[4]
    record = read_record(runner.record_path(trained(whole, tmp_path / "other", "on_corrupt=skip")))
    assert not {"validation_images", "corrupt_indices"} & set(record.results) and not any(
        "corrupt_indices" in entry for entry in record.history
    )


def test_an_unreadable_validation_image_ends_a_run_with_the_way_out(tmp_path, capsys):
    data = write_folders(
        write_folders(tmp_path / "images", "train", range(12)), "validation", range(12, 20), corrupt=(13,)
    )
    assert (
        command.main(
            [
                "train",
                "--recipe",
                "mae-scratch-vit-base",
                "--data",
                str(data),
                "--out",
                str(tmp_path / "run"),
                *sets(*TINY),
            ]
        )
        == 2
    )
    assert "`python -m atlib resume DIR --on-corrupt skip`" in capsys.readouterr().err
    assert command.main(["resume", str(tmp_path / "run"), "--on-corrupt", "skip"]) == 0
    assert read_record(runner.record_path(tmp_path / "run")).results["validation_images"] == 7
