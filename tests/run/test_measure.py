"""`python -m atlib evaluate` on sets under a shift and of several models, against both written out."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from timm.data import ImageNetInfo

from atbook.worlds import glyph_images, glyphs
from atlib.checkpoint import load_vit
from atrun.data.natural_shifts import IMAGENET_A, IMAGENET_R
from atrun.data.photos import open_photos
from atrun.data.transforms import Augmentation
from atrun.measure import ModelOnTest, measured_lines, same_images
from tests.helpers import tiny
from tests.picture_files import cut_jpeg, encoded, picture, write_folders
from tests.run import photographs

LOOK = {"image_size": 16, "crop_pct": 1.0, "mean": [0.4] * 3, "std": [0.3] * 3}
IDS = list(ImageNetInfo().label_names())


def prepared(index):
    return Augmentation(**LOOK).evaluate(picture(index, (20, 18)))


def folder_of(path, classes, count=12, corrupt=()):
    """A folder for each of some classes of ImageNet, by WordNet id: {image: class index}."""
    label_of = {index: classes[index % len(classes)] for index in range(count)}
    for index, label in label_of.items():
        file = path / IDS[label] / f"{index:03d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(cut_jpeg(index) if index in corrupt else encoded(picture(index, (20, 18))))
    return label_of


def said(capsys, *words):
    """(exit code, [accuracy of each line], all that was printed) of an evaluation."""
    code, out, err = photographs.said(capsys, "evaluate", *words)
    return code, [float(found) for found in re.findall(r"accuracy ([\d.]+) %", out)], out + err


def logits_of(path, images):
    with torch.no_grad():
        return load_vit(path).eval()(images)


@pytest.mark.parametrize("name, space", [("imagenet-a", IMAGENET_A), ("imagenet-r", IMAGENET_R)])
def test_a_head_of_a_thousand_classes_decides_among_the_sets_two_hundred(tmp_path, capsys, name, space):
    weights = photographs.vit_file(tmp_path / "vit.safetensors", 1000, said={"augmentation": LOOK})
    label_of = folder_of(tmp_path / "images", [space.classes[i] for i in (0, 3, 77, 199)], count=40)
    code, accuracies, text = said(capsys, weights, "--shifted", name, "--data_path", tmp_path / "images")
    assert code == 0 and "(200 of 1,000 classes)" in text and "of 40 images" in text

    logits = logits_of(weights, torch.stack([prepared(index) for index in label_of]))
    allowed = torch.full((1000,), -torch.inf)
    allowed[list(space.classes)] = 0
    right = (logits + allowed).argmax(1) == torch.tensor(list(label_of.values()))
    among_all = logits.argmax(1) == torch.tensor(list(label_of.values()))
    assert accuracies == [round(100 * right.double().mean().item(), 2)]
    # otherwise this would not tell the two apart
    assert not torch.isin(logits.argmax(1), torch.tensor(space.classes)).all()
    assert right.sum() >= among_all.sum()


def test_a_set_of_all_classes_is_decided_among_all(tmp_path, capsys):
    weights = photographs.vit_file(tmp_path / "vit.safetensors", 1000, said={"augmentation": LOOK})
    images = torch.stack([prepared(index) for index in range(9)])
    guessed = logits_of(weights, images).argmax(1).tolist()
    # six of nine are labelled as the model says, the others as the next class
    labels = [guess if index < 6 else (guess + 1) % 1000 for index, guess in enumerate(guessed)]
    for index, label in enumerate(labels):  # ImageNetV2's folders are called 0 to 999
        path = tmp_path / "v2" / str(label) / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(picture(index, (20, 18))))
    code, accuracies, text = said(capsys, weights, "--shifted", "imagenetv2", "--data_path", tmp_path / "v2")
    assert (code, accuracies) == (0, [66.67]) and "classes)" not in text


@pytest.mark.parametrize("kind", ["ids", "numbers", "names", "moved", "others"])
def test_a_shifted_set_is_no_test_of_a_model_with_its_classes_in_another_order(tmp_path, capsys, kind):
    names = list(ImageNetInfo().label_descriptions())
    classes = {
        "ids": IDS,
        "numbers": [*map(str, range(1000))],
        # as others call them: one that is called like another class, which is called so too
        "names": [*names[:836], "sunglasses, dark glasses, shades", *names[837:]],
        "moved": sorted(names, key=str.casefold),
        "others": [f"kind {index}" for index in range(1000)],
    }[kind]
    said_of_it = {"augmentation": LOOK, "classes": classes}
    weights = photographs.vit_file(tmp_path / "vit.safetensors", 1000, said=said_of_it)
    folder_of(tmp_path / "images", IMAGENET_A.classes[:2], count=2)
    asked = (weights, "--shifted", "imagenet-a", "--data_path", tmp_path / "images")
    code, accuracies, text = said(capsys, *asked)
    assert (code, len(accuracies)) == ((2, 0) if kind == "moved" else (0, 1))
    assert ("taken for output k" in text) == (kind == "others")


def test_what_cannot_be_decoded_is_left_out_with_its_label(tmp_path, capsys):
    weights = photographs.vit_file(tmp_path / "vit.safetensors", 1000, said={"augmentation": LOOK})
    classes = [IMAGENET_A.classes[i] for i in (0, 5, 9)]
    label_of = folder_of(tmp_path / "images", classes, count=12, corrupt=(4, 7))
    asked = (weights, "--shifted", "imagenet-a", "--data_path", tmp_path / "images")
    code, _, text = said(capsys, *asked)
    assert code == 2 and "cannot be decoded" in text
    code, accuracies, text = said(capsys, *asked, "--on_corrupt", "skip", "--workers", "1")
    logits = logits_of(weights, torch.stack([prepared(i) for i in label_of if i not in (4, 7)]))
    best = torch.tensor(IMAGENET_A.classes)[logits[:, list(IMAGENET_A.classes)].argmax(1)]
    right = best == torch.tensor([label for i, label in label_of.items() if i not in (4, 7)])
    assert accuracies == [round(100 * right.double().mean().item(), 2)]
    assert code == 0 and "of 10 images (without 2 " in text


def test_an_ensemble_is_the_mean_of_probabilities_each_model_with_its_own_images(tmp_path, capsys):
    data = write_folders(tmp_path / "images", "validation", range(30))
    other = LOOK | {"mean": [0.1] * 3, "std": [0.9] * 3}
    looks = {"one": LOOK, "two": other, "three": LOOK}
    one, two, three = (
        photographs.vit_file(tmp_path / f"{name}.safetensors", 3, seed, {"augmentation": look})
        for seed, (name, look) in enumerate(looks.items())
    )
    code, accuracies, text = said(capsys, one, two, three, "--data", data)
    labels = open_photos(data, split="validation").targets

    p, expected = torch.zeros(30, 3, dtype=torch.float64), []
    for path, look in ((one, LOOK), (two, other), (three, LOOK)):
        photos = open_photos(data, split="validation", augmentation=Augmentation(**look))
        own = logits_of(path, photos.take(range(30))[0]).double().softmax(1)
        p += own / 3
        expected.append(100 * (own.argmax(1) == labels).double().mean().item())
    expected.append(100 * (p.argmax(1) == labels).double().mean().item())
    assert code == 0 and accuracies == pytest.approx(expected, abs=0.005)
    loss = -p[range(30), labels].log().mean().item()
    assert "ensemble of 3" in text and f"loss {loss:.4f}" in text.splitlines()[-1]
    # alone, each is what it is among others
    assert said(capsys, two, "--data", data)[1] == accuracies[1:2]


def test_photographs_for_a_model_of_images_in_memory_are_normalised_as_its_file_says(tmp_path, capsys):
    data = write_folders(tmp_path / "images", "validation", range(30))
    for index, file in enumerate(sorted(data.rglob("*.png"))):
        file.write_bytes(encoded(picture(index, (16, 16))))
    stored = {"augmentation": None, "normalisation": {name: LOOK[name] for name in ("mean", "std")}}
    files = [
        photographs.vit_file(tmp_path / f"{name}.safetensors", 3, said=header)
        for name, header in (("stored", stored), ("prepared", {"augmentation": LOOK}))
    ]
    losses = [re.findall(r"loss [\d.]+", said(capsys, file, "--data", data)[2])[0] for file in files]
    assert losses[0] == losses[1]


def test_folders_of_other_images_with_equal_labels_make_no_ensemble(tmp_path):
    images = glyph_images(glyphs.generate("test", 8))
    one = ModelOnTest(Path("one"), tiny(1), images, images.targets, "here, test")
    copied = one._replace(path=Path("two"), on="there, test")
    assert "ensemble of 2" in measured_lines([one, copied])[-1], "the same images at another place"
    other = copied._replace(images=replace(images, pixels=images.pixels.flip(0)))
    with pytest.raises(ValueError, match="two is tested on there, test, one on here"):
        measured_lines([one, other])


def test_the_same_images_are_known_wherever_they_are_and_however_they_are_prepared(tmp_path):
    for folder, colours in (("one", range(6)), ("copy", range(6)), ("other", range(6, 12))):
        write_folders(tmp_path / folder, "validation", colours)
    opened = {
        folder: open_photos(str(tmp_path / folder), split="validation", augmentation=Augmentation(size))
        for folder, size in (("one", 32), ("copy", 48), ("other", 32))
    }
    assert torch.equal(opened["one"].targets, opened["other"].targets)
    assert same_images(opened["one"], opened["copy"]) and not same_images(opened["one"], opened["other"])
    assert not same_images(opened["one"], opened["copy"].select(range(len(opened["copy"]) - 1)))
