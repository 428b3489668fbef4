"""Accuracy and loss by counting; the model is left as it was."""

import math
import warnings

import pytest
import torch
from torch import nn

from atlib import AttentionTransfer, Plan, create_vit
from atlib.analysis import compare_layers
from atlib.data import Images
from atlib.evaluate import evaluate, predict, score
from atlib.pair import Normalisation, View, attach
from atlib.recipe import Recipe
from atlib.student import create_student
from atlib.train import train


class Scores(nn.Module):
    """Logits that are written in the image itself: the first pixels of its first row."""

    def __init__(self, classes=4):
        super().__init__()
        self.classes, self.scale = classes, nn.Parameter(torch.ones(()))
        self.modes = []

    def forward(self, images):
        self.modes.append((self.training, torch.is_grad_enabled(), len(images)))
        return self.scale * images[:, 0, 0, : self.classes]


@pytest.fixture
def data():
    pixels = torch.randint(0, 256, (23, 3, 4, 4), dtype=torch.uint8)
    return Images(pixels, torch.randint(0, 4, (23,)))


@pytest.mark.parametrize("batch_size", [1, 7, 23, 500])
def test_accuracy_and_loss_by_counting(data, batch_size):
    right, loss = 0, 0.0
    for index in range(23):
        row = [(value / 255 - 0.5) / 0.25 for value in data.pixels[index, 0, 0].tolist()]
        label = data.targets[index].item()
        right += row.index(max(row)) == label
        loss += (math.log(sum(math.exp(value) for value in row)) - row[label]) / 23
    found = evaluate(Scores(), data, batch_size)
    assert tuple(found) == pytest.approx((right / 23, loss, 23), rel=1e-5) and 0 < right < 23


def test_predictions_come_in_order_and_in_evaluation_mode(data):
    model = Scores()
    logits = predict(model, data, 10)
    assert torch.equal(logits, (data.pixels[:, 0, 0].float() / 255 - 0.5) / 0.25) and not logits.requires_grad
    assert model.modes == [(False, False, 10), (False, False, 10), (False, False, 3)]


def test_every_part_is_left_in_its_mode(small_vit):
    vit = small_vit().train()
    images = Images(torch.zeros(2, 3, 32, 32, dtype=torch.uint8), torch.tensor([0, 1]))
    vit.blocks[1].eval()
    modes = [part.training for part in vit.modules()]
    evaluate(vit, images)
    assert [part.training for part in vit.modules()] == modes and set(modes) == {True, False}
    vit.forward = lambda images: 1 / 0
    with pytest.raises(ZeroDivisionError):
        evaluate(vit, images)
    assert [part.training for part in vit.modules()] == modes


def test_what_would_be_counted_as_a_prediction_is_refused(small_vit):
    """The argmax of NaN is class 0; an image without a label would be a wrong answer."""
    broken = small_vit(seed=1)
    broken.blocks[1].attn.qkv.weight.data[0, 0] = math.nan
    for model, labels in (
        (small_vit(), [0, 5]),  # of five classes
        (AttentionTransfer(broken, small_vit(seed=2), Plan()), [0, 0]),
        (small_vit(), [0, -100]),
        (small_vit(num_classes=0), [0, 1]),
        (nn.DataParallel(small_vit(num_classes=0)), [0, 1]),
    ):
        data = Images(torch.zeros(2, 3, 32, 32, dtype=torch.uint8), torch.tensor(labels))
        with pytest.raises(ValueError):
            evaluate(model, data)
    with pytest.raises(ValueError):
        score(torch.tensor([[math.inf, 0.0], [0.0, 1.0]]), torch.tensor([0, 1]))
    found = score(torch.tensor([[-math.inf, 0.0], [0.0, 1.0]]), torch.tensor([1, 1]))
    assert found.accuracy == 1 and math.isfinite(found.loss), "a class may be ruled out"


def test_a_model_in_half_precision_is_given_such_images(small_vit):
    """And the images that its pair resizes for a teacher of another size are of that precision, too."""
    images = Images(torch.randint(0, 256, (6, 3, 32, 32), dtype=torch.uint8), torch.arange(6) % 5, [*"abcde"])
    student = small_vit()
    exact = predict(student, images)
    half = predict(student.bfloat16(), images)
    assert half.dtype == torch.float32 and (half - exact).abs().max() < 0.05 * exact.abs().max()
    teacher = small_vit(1, img_size=16, patch_size=4)
    seen = View(None, (16, 16)).show(torch.ones(1, 3, 32, 32, dtype=torch.bfloat16), None)
    assert seen.shape == (1, 3, 16, 16) and seen.dtype == torch.bfloat16
    pair = AttentionTransfer(teacher, small_vit(2), Plan(how="distill")).bfloat16()
    assert pair.train()(images.take(range(2))[0].bfloat16()).transfer_loss.isfinite()


def test_a_model_for_images_of_another_normalisation_is_warned_of(small_vit):
    """Until it was trained on these; and a fresh student says nothing of its teacher's."""
    images = Images(torch.zeros(2, 3, 32, 32, dtype=torch.uint8), torch.tensor([0, 1]), mean=0.5, std=0.25)
    vit, half = small_vit(), Normalisation(0.5, 0.5)
    attach(vit, half)
    for use in (
        lambda: evaluate(vit, images),
        lambda: evaluate(nn.DataParallel(vit), images),
        lambda: compare_layers(vit, small_vit(1), images),
    ):
        with pytest.warns(UserWarning, match="0.25"):
            use()
    teacher = create_vit("vit_tiny_patch16_224.augreg_in21k", depth=1)
    assert Normalisation.of(teacher) == half and Normalisation.of(create_student(teacher, 5)) is None
    train(vit, images, Recipe(steps=1, batch_size=2, lr=1e-3))
    assert Normalisation.of(vit) == images.normalisation != half
    with warnings.catch_warnings(action="error"):
        evaluate(vit, images)
