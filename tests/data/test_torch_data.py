"""Torch's own Dataset and DataLoader: the same bits as this project's data, also after an interruption."""

import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset
from torchvision import transforms
from torchvision.datasets import ImageFolder

from atlib import AttentionTransfer, Plan
from atlib.data import TorchData, as_data, normalisation_of
from atlib.evaluate import evaluate
from atlib.pair import IMAGENET, Normalisation, attach
from atlib.recipe import Recipe
from atlib.train import train
from tests.helpers import same, state_of, tiny
from tests.picture_files import write_folders

SHORT = Recipe(steps=6, batch_size=8, lr=1e-3)
IN_WORLD = Normalisation(0.5, 0.25)


class Items(Dataset):
    def __init__(self, *items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


@pytest.fixture
def images(glyphs64):
    return glyphs64.select(range(20))


@pytest.fixture
def tensors(images):
    return TensorDataset(*images.take(range(len(images))))


def trained(data, model=None, recipe=SHORT, **options):
    model = tiny() if model is None else model
    train(model, data, recipe, cpu=True, progress=None, **options)
    return state_of(model)


def test_training_on_tensors_gives_the_bits_of_training_on_images(images, tensors):
    expected = trained(images)
    assert same(trained(tensors), expected)
    assert same(trained(Subset(tensors, range(20))), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing of this loader is replaced
        assert same(trained(DataLoader(tensors, SHORT.batch_size, shuffle=True)), expected)


def test_what_of_a_loader_is_replaced_is_said(tensors, images):
    with pytest.warns(UserWarning, match="batch_size=7"):
        found = trained(DataLoader(tensors, 7, drop_last=True))
    assert same(found, trained(images))


def folder_of(path, transform=None, **options):
    write_folders(path, "train", range(12))
    return ImageFolder(path / "train", transform, **options)


def prepared(*more, normalise=IMAGENET):
    steps = [transforms.RandomResizedCrop(16), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
    return transforms.Compose([*steps, transforms.Normalize(normalise.mean, normalise.std), *more])


def test_normalisation_is_read_off_the_transform(tmp_path):
    other = Normalisation((0.1, 0.2, 0.3), (0.2, 0.3, 0.4))
    data = folder_of(tmp_path, prepared(normalise=other))
    assert normalisation_of(data) == other
    assert normalisation_of(Subset(data, [0])) == normalisation_of(ConcatDataset([data, data])) == other
    assert normalisation_of(ImageFolder(tmp_path / "train", transforms.ToTensor())) is None
    in_tensors = transforms.Compose([transforms.Normalize(torch.tensor(other.mean), torch.tensor(other.std))])
    assert normalisation_of(ImageFolder(tmp_path / "train", in_tensors)) == other
    data.normalisation = IN_WORLD
    assert normalisation_of(data) == IN_WORLD
    del data.normalisation
    with pytest.raises(ValueError):
        trained(data, AttentionTransfer(tiny(1), tiny(2), Plan(), normalisation=IMAGENET))
    with pytest.raises(ValueError):
        normalisation_of(ConcatDataset([data, ImageFolder(tmp_path / "train", prepared())]))


def test_it_is_said_where_nobody_says_the_normalisation(tensors):
    teacher = tiny(1)
    attach(teacher, IMAGENET)
    silent = AttentionTransfer(teacher, tiny(2), Plan())
    with pytest.warns(UserWarning, match="normalisation=") as said:
        trained(tensors, silent)
    assert sum("normalisation=" in str(warning.message) for warning in said) == 1, "once, not at every step"


def test_pixels_that_were_not_scaled_are_warned_of():
    pixels = torch.zeros(3, 8, 8)
    pixels[0, 0, 0] = 255
    with pytest.warns(UserWarning, match="255"):
        data = TorchData(Items((pixels, 0), (pixels, 1)))
    assert data.take([1])[0].max() == 255, "it is said, and not changed"


def test_a_collate_fn_makes_batches_of_other_items(images, tensors):
    rows = [{"pixels": image, "class": int(label)} for image, label in tensors]

    def collate(rows):
        return torch.stack([row["pixels"] for row in rows]), torch.tensor([row["class"] for row in rows])

    loader = DataLoader(Items(*rows), 8, shuffle=True, collate_fn=collate)
    assert same(trained(loader), trained(images))
    with pytest.raises(ValueError):
        as_data(DataLoader(Items(*rows), 8, collate_fn=lambda rows: collate([*rows, *rows])))


IMAGE = torch.zeros(3, 8, 8)


def test_labels_and_shares():
    soft = torch.tensor([0.5, 0.5])
    for label in (1, np.int64(1), torch.tensor(1, dtype=torch.uint8), True):
        targets = TorchData(Items((IMAGE, label))).take([0])[1]
        assert targets.dtype == torch.int64 and targets.tolist() == [1]
    assert torch.equal(TorchData(Items((IMAGE, soft))).take([0])[1], soft[None])
    with pytest.raises(ValueError):
        evaluate(tiny(img_size=8, num_classes=2), Items((IMAGE, soft)))


def test_an_item_that_cannot_be_read_is_named(tmp_path):
    data = folder_of(tmp_path, prepared())
    with open(data.samples[5][0], "wb") as file:
        file.write(b"no image")
    with pytest.raises(OSError) as raised:
        TorchData(data).take([4, 5])
    assert any("item 5" in note for note in raised.value.__notes__)
