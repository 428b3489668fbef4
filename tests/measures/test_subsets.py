"""Long tails, groups of classes and adversarial filtering, counted by hand."""

import copy

import pytest
import torch
from torch import nn

from atfamily.measures.subsets import (
    adversarially_filtered,
    class_counts,
    class_groups,
    evaluate_filtered,
    group_accuracy,
    long_tail,
)
from atlib.data import Images


def of_classes(labels, classes=(), **options):
    """Images whose every pixel is their position."""
    labels = torch.as_tensor(labels)
    position = torch.arange(len(labels)).to(torch.uint8)
    return Images(position[:, None, None, None].expand(-1, 3, 2, 2).contiguous(), labels, classes, **options)


def positions(images):
    return images.pixels[:, 0, 0, 0].tolist()


class Reader(nn.Module):
    """Says class `pixel % classes + shift`: right where that is the label."""

    def __init__(self, classes=4, shift=0):
        super().__init__()
        self.classes, self.shift = classes, nn.Parameter(torch.tensor(float(shift)))

    def forward(self, images):
        pixel = ((images[:, 0, 0, 0] * 0.25 + 0.5) * 255).round().long()
        return nn.functional.one_hot((pixel + self.shift.long()) % self.classes, self.classes).float()


@pytest.mark.parametrize(
    "classes, factor, wanted",
    [
        (3, 100, [100, 10, 1]),  # 100 · 100^(-1/2) = 10
        (5, 16, [100, 50, 25, 12, 6]),  # halves, rounded down
    ],
)
def test_long_tail_has_the_exponential_profile(classes, factor, wanted):
    labels = torch.arange(classes).repeat(100)
    images = Images(torch.zeros(len(labels), 3, 2, 2, dtype=torch.uint8), labels)
    assert class_counts(long_tail(images, factor)) == wanted
    few = of_classes([0] * 40 + [1] * 7 + [2] * 40)
    assert class_counts(long_tail(few, 4)) == [40, 7, 10], "a class with fewer than its share keeps all"


def test_long_tail_keeps_images_with_their_labels_in_order_and_their_treatment():
    labels = torch.tensor([0, 1, 2] * 20)
    images = of_classes(labels, ("a", "b", "c"), mean=0.1, std=0.9, augment=abs)
    chosen = long_tail(images, 4, seed=3)
    kept = positions(chosen)
    assert kept == sorted(set(kept)) and chosen.targets.tolist() == [position % 3 for position in kept]
    of_first = [position for position in kept if position % 3 == 0]
    assert of_first == list(range(0, 60, 3)), "the first class keeps all"
    assert (chosen.classes, chosen.mean, chosen.std, chosen.augment) == (("a", "b", "c"), 0.1, 0.9, abs)
    assert positions(images) == list(range(60))


def test_groups_at_the_published_limits_and_at_others_leave_out_the_empty():
    assert class_groups([101, 100, 20, 19, 1000, 0]) == {"many": [0, 4], "medium": [1, 2], "few": [3, 5]}
    assert class_groups([9, 3, 1], many=5, few=2) == {"many": [0], "medium": [1], "few": [2]}
    assert class_groups([9, 8], many=5, few=2) == {"many": [0, 1]}


def test_group_accuracy_is_a_mean_over_classes_by_hand():
    labels = torch.tensor([0, 0, 0, 0, 1, 2, 2, 3])
    # Right: class 0 3 of 4, class 1 0 of 1, class 2 1 of 2, class 3 1 of 1.
    answers = torch.tensor([0, 0, 0, 3, 0, 2, 0, 3])
    logits = nn.functional.one_hot(answers, 6).float()
    groups = {"many": [0, 1], "medium": [2, 4], "few": [3], "unseen": [4, 5]}
    assert group_accuracy(logits, labels, groups) == {"many": (3 / 4 + 0) / 2, "medium": 1 / 2, "few": 1.0}


def test_filtering_keeps_exactly_what_the_reference_gets_wrong():
    labels = torch.tensor([0, 1, 2, 3, 1, 1, 2, 0, 0, 1])  # the reference says 0 1 2 3 0 1 2 3 0 1
    images = of_classes(labels, ("a", "b", "c", "d"), augment=lambda images, seeds: 255 - images)
    reference = Reader().train()
    filtered = adversarially_filtered(images, reference, batch_size=3)
    assert positions(filtered.images) == [4, 7] and filtered.images.targets.tolist() == [1, 0]
    assert filtered.reference is reference and reference.training
    assert filtered.images.augment is images.augment and filtered.images.classes == images.classes


def test_the_reference_and_its_copies_are_kept_out_of_the_comparison():
    images = of_classes([0, 1, 2, 3, 1, 0, 1, 2])  # a reader shifted by one says 1 2 3 0 1 2 3 0
    reference = Reader(shift=1)
    filtered = adversarially_filtered(images, reference)
    assert positions(filtered.images) == [0, 1, 2, 3, 5, 6, 7]
    for model in (reference, copy.deepcopy(reference)):
        with pytest.raises(ValueError):
            evaluate_filtered(model, filtered)
    judged = evaluate_filtered(Reader(shift=0), filtered)  # 0 1 2 3 . 1 2 3: right on the first four of seven
    assert judged.accuracy == pytest.approx(4 / 7) and judged.count == 7
