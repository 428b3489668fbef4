"""Natural shifts: which class a stored label means, files of the hub and of the authors, accuracy on sets."""

import hashlib

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import RealLabelsImagenet

from atfamily.measures.subsets import accuracy_on
from atrun.data.natural_shifts import IMAGENET, IMAGENET_A, SHIFTED, open_shifted
from tests.helpers import shared
from tests.picture_files import encoded

# SHA-256 of the sorted ids, one a line, taken on the lists in the authors' eval.py: numbers and ids in the
# order of ImageNet-1k (hendrycks/natural-adv-examples, hendrycks/imagenet-r).
SHA256 = {
    "imagenet-a": "f6aa4b23244554d9b864fd715ae20048f6a9686388911b2dfbf1ada01bf0f520",
    "imagenet-r": "e19a59d84e3746fafd34d2ccf6ae604a44e9a0500a596f343c878a89e30ce624",
}


def picture(value):
    return Image.fromarray(np.full((6, 6, 3), value, dtype=np.uint8))


def rows_in(opened):
    """Which rows the pictures say that they are."""
    normalised = opened.images.take(range(len(opened.images)))[0][:, 0, 0, 0]
    said = opened.images.normalisation
    return (255 * (normalised * said.std[0] + said.mean[0])).round().int().tolist()


# Which classes


@pytest.mark.parametrize("name", SHA256)
def test_the_two_hundred_classes_are_the_published_ones(name):
    classes = SHIFTED[name].space.classes
    ids = [IMAGENET.ids[index] for index in classes]
    assert len(set(classes)) == 200 and list(classes) == sorted(classes)
    assert hashlib.sha256("\n".join(sorted(ids)).encode()).hexdigest() == SHA256[name]


def test_real_samples_agree_by_id_and_by_name():
    path = shared("data", "imagenet_samples256") / "train.parquet"
    rows = datasets.load_dataset("parquet", data_files=str(path))["train"]
    ids, names = list(rows["wnid"]), list(rows["name"])
    assert IMAGENET.indices(ids) == list(range(1000))
    # Short names; those of a few classes are spelt in another way there, or are the name of two classes.
    first = [of_class.split(", ")[0].replace(" ", "_") for of_class in IMAGENET.names]
    clear = [i for i, name in enumerate(names) if name == first[i] and names.count(name) == 1]
    assert len(clear) > 900 and IMAGENET.indices([names[index] for index in clear]) == clear


@pytest.mark.parametrize(
    "labels, given, wanted",
    [
        (["n01443537", "n01440764", "n01443537"], None, [1, 0, 1]),
        (["tench", "tench, Tinca tinca", "great_white_shark"], None, [0, 0, 2]),
        (["10", "2"], None, [10, 2]),
        ([0, 1, 2], ["0", "1", "10"], [0, 1, 10]),  # folders sorted as text, as ImageNetV2's are
        ([1], ["some other class", "tench"], [0]),  # names that no image has do not matter
        ([134, 517], list(IMAGENET.names), [134, 517]),  # both are "crane"
        (["Cardigan", "cardigan"], None, [264, 474]),  # a dog and a garment
    ],
)
def test_labels_become_classes(labels, given, wanted):
    assert IMAGENET.indices(labels, given) == wanted


# Files


def test_imagenet_a_with_ids_as_class_names(tmp_path):
    ids = [IMAGENET.ids[index] for index in IMAGENET_A.classes]
    features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=ids)}
    rows = {"image": list(map(picture, range(3))), "label": [199, 0, 5]}
    path = tmp_path / "train-00000-of-00001.parquet"
    datasets.Dataset.from_dict(rows, datasets.Features(features)).to_parquet(path)
    opened = open_shifted("imagenet-a", path)
    assert opened.targets.tolist() == [988, 6, 22] and rows_in(opened) == [0, 1, 2]
    assert opened.images.classes == IMAGENET.names and opened.classes == IMAGENET_A.classes


def test_reassessed_labels_go_by_file_name_and_leave_out_the_unlabelled(tmp_path):
    """Against timm's own evaluator."""
    numbers = [3, 50000, 1, 2, 16, 22, 5]  # not in order; the published list has no label for images 1 and 22
    names = [f"ILSVRC2012_val_{number:08d}.JPEG" for number in numbers]
    files = [{"bytes": encoded(picture(row)), "path": name} for row, name in enumerate(names)]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    rows = datasets.Dataset.from_dict({"image": files, "label": [0] * len(files)}, features)
    rows.to_parquet(tmp_path / "validation.parquet")
    opened = open_shifted("imagenet-real", tmp_path / "validation.parquet")
    published = RealLabelsImagenet([""] * 50_000).real_labels
    wanted = [published[name] for name in names]
    assert [number for number, labels in zip(numbers, wanted) if not labels] == [1, 22]
    assert rows_in(opened) == [0, 1, 3, 4, 6]
    assert opened.targets.dtype == torch.bool and opened.targets.shape == (5, 1000)
    for target, labels in zip(opened.targets, [labels for labels in wanted if labels]):
        assert set(target.nonzero()[:, 0].tolist()) == set(labels)


def test_accuracy_on_reassessed_labels_is_timms():
    """The same logits for the first 2,000 images: the share right of those that have a label."""
    logits = torch.randn(2000, 1000, generator=torch.Generator().manual_seed(0))
    judge = RealLabelsImagenet([f"ILSVRC2012_val_{n + 1:08d}.JPEG" for n in range(50_000)], topk=(1,))
    assert sum(map(bool, judge.real_labels.values())) == 46_837
    sets = torch.zeros(2000, 1000, dtype=torch.bool)
    for row, labels in enumerate([judge.real_labels[name] for name in judge.filenames[:2000]]):
        sets[row, labels] = True
        if labels and row % 2:
            logits[row, labels[-1]] += 10  # right for half of them, through the last label of the set
    judge.add_result(logits)
    labelled = sets.any(1)
    assert 0 < labelled.sum() < 2000
    right = judge.get_accuracy(1) / 100
    assert accuracy_on(logits[labelled], sets[labelled]) == pytest.approx(right, abs=1e-9)
