"""`python -m atlib evaluate` on photographs: read as asked, prepared as in training, what was left out."""

import re
import shutil

import pytest

from atlib.checkpoint import load_vit, read_header, save_vit
from atlib.evaluate import evaluate
from atlib.pair import attach
from atlib.vit import Architecture
from atrun import __main__ as command
from atrun.compare import compare_runs
from atrun.config import read_config
from atrun.data.catalogue import CATALOGUE
from atrun.data.photos import open_photos
from atrun.data.transforms import Augmentation
from atrun.record import read_record
from tests.picture_files import write_folders, write_parquet
from tests.run import photographs

PREPARED = ("augmentation.mean=[0.3,0.4,0.5]", "augmentation.crop_pct=1")


def trained(data, out, *changes):
    assert command.main(photographs.asked(data, out, *PREPARED, *changes)) == 0
    return out


def said(capsys, *words):
    """(exit code, accuracy, images, loss, all that was printed) of an evaluation."""
    code, out, err = photographs.said(capsys, "evaluate", *words)
    found = re.search(r"accuracy ([\d.]+) % of ([\d,]+) images.*, loss ([\d.]+)", out)
    return code, *(found.groups() if found else (None,) * 3), out + err


def test_moved_weights_see_the_images_as_their_run_did(tmp_path, capsys):
    data = write_folders(write_folders(tmp_path / "images", "train", range(12)), "validation", range(12, 20))
    run = trained(data, tmp_path / "run", "ema=0.5")
    expected = read_record(run / "record.json").results
    here = said(capsys, run)
    accuracy, loss = expected["validation_accuracy"], expected["validation_loss"]
    assert here[1:4] == (f"{100 * accuracy:.2f}", "8", f"{loss:.4f}")
    for name in ("student", "averaged"):
        header = read_header(run / f"{name}.safetensors")
        assert header["augmentation"] == read_config(run).describe()["augmentation"]
    (tmp_path / "elsewhere").mkdir()
    moved = shutil.copy(run / "student.safetensors", tmp_path / "elsewhere" / "any.safetensors")
    there = said(capsys, moved, "--data", data)
    assert there[:4] == here[:4] and "does not say" not in there[4]
    assert said(capsys, run / "student.safetensors", "--data", data)[:4] == here[:4]

    # as files were before they said it
    vit, silent = (load_vit(moved), tmp_path / "elsewhere" / "silent.safetensors")
    attach(vit, None)
    save_vit(silent, vit, Architecture(**read_header(moved)["architecture"]))
    guessed = said(capsys, silent, "--data", data)
    assert guessed[0] == 0 and guessed[3] != here[3]
    assert "16 pixels, crop 0.9, mean (0.485, 0.456, 0.406)" in guessed[4]


def test_a_folder_that_has_grown_since_holds_other_images_out(tmp_path, capsys):
    data = write_folders(tmp_path / "images", "train", range(20))
    run = trained(data, tmp_path / "run")
    header = read_header(run / "student.safetensors")["tested_on"]
    assert (header["split"], header["images"]) == ("validation", 2)
    assert "other images" not in said(capsys, run)[4]
    write_folders(data, "train", range(20, 36))
    grown = said(capsys, run)
    assert grown[:3:2] == (0, "4")
    assert "other images than when the run ended (2 then, 4 now)" in grown[4]
    assert "(2 then, 4 now)" in said(capsys, run, "--data", data)[4]
    with pytest.warns(UserWarning, match="2 then, 4 now"):
        compare_runs(run, run)
    (run / "record.json").unlink()
    assert command.main(["resume", str(run)]) == 2
    refused = capsys.readouterr().err
    assert "images was 18 and is 32" in refused and "contents." in refused
    assert not (run / "record.json").exists()


def test_data_are_read_as_asked(tmp_path, capsys):
    weights = photographs.vit_file(tmp_path / "vit.safetensors")
    options = {"image_column": "pix", "label_column": "y", "corrupt": (2, 5)}
    data = write_parquet(tmp_path / "images", "validation", range(9), **options)
    columns = "--image_column=pix", "--label_column=y"
    code, *_, text = said(capsys, weights, "--data", data)
    assert code == 2 and "image_column=" in text
    code, *_, text = said(capsys, weights, "--data", data, "--image_column=y", "--label_column=pix")
    assert code == 2 and "['pix', 'y']" in text
    asked = weights, "--data", data, *columns
    code, *_, text = said(capsys, *asked, "--on_corrupt=raise")
    assert code == 2 and "image 2 " in text and "--on-corrupt skip" in text
    assert said(capsys, *asked)[2] == "7", "left out, and counted"
    code, accuracy, count, loss, text = said(capsys, *asked, "--on_corrupt=skip", "--workers=1")
    assert "image 2 " in text and "image 5 " in text
    options = {"augmentation": Augmentation(16), "image_column": "pix", "label_column": "y"}
    with pytest.warns(UserWarning):
        left = open_photos(data, split="validation", on_corrupt="skip", **options)
        expected = evaluate(load_vit(weights), left)
    assert (code, accuracy, count, loss) == (0, f"{100 * expected.accuracy:.2f}", "7", f"{expected.loss:.4f}")
    assert "of 7 images (without 2 " in text


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
    assert code == 2 and f"{data} " in text and "--data_path FOLDER" in text
    moved = f"--data_path={tmp_path / 'moved'}"
    assert said(capsys, run, moved)[1:4] == here[1:4]
    assert said(capsys, run / "student.safetensors", "--data", "imagenet-1k", moved)[1:4] == here[1:4]


def test_a_record_says_on_how_many_images_and_which_were_corrupt(tmp_path, capsys):
    data = write_folders(
        write_folders(tmp_path / "images", "train", range(12), corrupt=(4,)),
        "validation",
        range(12, 20),
        corrupt=(13, 16),
    )
    whole = write_folders(write_folders(tmp_path / "whole", "train", range(12)), "validation", range(12, 20))
    run = trained(data, tmp_path / "run", "on_corrupt=skip", "evaluate_every=1")
    record = read_record(run / "record.json")
    out, err = capsys.readouterr()
    for name in ("train/dog/004", "validation/dog/013", "validation/dog/016"):
        assert f"{name}.png)" in err
    place = sorted(range(12), key=lambda index: (index % 3, index)).index(4)  # folder by folder
    for entry in record.history:
        assert (entry["corrupt"], entry["corrupt_indices"], entry["validation_images"]) == (1, [place], 6)
    assert len(record.history) == 2
    assert record.results["validation_images"] == 6 and "validation_images 6" in out
    assert "% of 6 images (without 2 " in said(capsys, tmp_path / "run")[4]
    record = read_record(trained(whole, tmp_path / "other", "on_corrupt=skip") / "record.json")
    assert "validation_images" not in record.results
    assert not any("corrupt_indices" in entry for entry in record.history)
