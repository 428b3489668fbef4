"""Which label of other data is which output: by name where there are names, numbers too (vision#714)."""

from types import SimpleNamespace

import pytest
import torch

from atrun.classes import labels_by_name

NUMBERS = tuple(map(str, range(12)))
WORDS = ("cat", "dog", "owl")


def outputs_of(classes, own, outputs=None):
    """The output of each class of the data."""
    images = SimpleNamespace(classes=own, targets=torch.arange(len(own)))
    model = torch.nn.Module()
    model.num_classes = len(own) if outputs is None else outputs
    labels, said = labels_by_name(classes, model, images, "data", "student.safetensors")
    return labels.tolist(), said


@pytest.mark.parametrize(
    "classes, own, right",
    [
        (NUMBERS, tuple(sorted(NUMBERS)), [int(each) for each in sorted(NUMBERS)]),  # folders 0, 1, 10, 11, 2
        (NUMBERS, tuple(f"{number:03d}" for number in range(12)), list(range(12))),
        (("4", "7", "9"), ("9", "4"), [2, 0]),
        (WORDS, ("owl", "cat"), [2, 0]),
    ],
)
def test_classes_are_matched_by_name_numbers_too(classes, own, right):
    labels, said = outputs_of(classes, own, len(classes))
    assert labels == right and "by their names" in said


@pytest.mark.parametrize("classes, own", [(NUMBERS[:3], WORDS), (WORDS, NUMBERS[:3]), (None, WORDS)])
def test_where_one_side_has_no_names_place_counts_and_is_said(classes, own):
    assert outputs_of(classes, own) == ([0, 1, 2], outputs_of(classes, own)[1])
    assert "class k of the data" in outputs_of(classes, own)[1]


@pytest.mark.parametrize(
    "classes, own, named",
    [
        (NUMBERS, tuple(str(number + 1) for number in range(12)), "'12'"),  # counted from 1
        (None, tuple(sorted(NUMBERS)), "another order"),
        (None, WORDS, "3 classes"),
        (("1", "01"), ("1",), "two classes of this name"),
        (WORDS, ("1", "2", "4"), "'1', '2', '4'"),
        (("cafe\u0301", "dog"), ("caf\u00e9", "dog"), r"'caf\\xe9'.*'cafe\\u0301'"),
    ],
)
def test_what_cannot_be_matched_is_refused_by_name(classes, own, named):
    with pytest.raises(ValueError, match=named):
        outputs_of(classes, own, 12 if classes == NUMBERS or classes is None else len(classes))
