"""Chapter 5: its file of rows, its sentences, and the commands for a GPU, each a run at 224 pixels."""

import re
import shlex

import pytest
import torch

from atbook.lab.class_rows import FILE, ClassRows, from_8_bits, in_8_bits, read_class_rows, write_class_rows
from atrun.configure import configured
from atrun.method import Method
from tests.book.test_chapter_form import prose
from tests.helpers import ROOT

CHAPTER = ROOT / "notebooks" / "05-photographs.md"
MORE = ROOT / "book" / "real-images.md"  # has the commands for a GPU


def commands() -> list[list[str]]:
    lines = re.findall(r"^python -m atlib (train .+)$", MORE.read_text(encoding="utf-8"), re.M)
    return [shlex.split(line) for line in lines]


@pytest.mark.parametrize("words", commands(), ids=lambda words: words[2])
def test_the_commands_for_a_gpu_configure_what_the_text_says(words):
    options = dict(zip(words[1::2], words[2::2], strict=True))
    recipe, data, teacher = (options[f"--{name}"] for name in ("recipe", "data", "teacher"))
    size = {"augmentation.image_size": options["--augmentation.image_size"]}
    config, _ = configured(recipe, data, teacher, size)
    assert config.augmentation.image_size == 224 and config.method == Method(recipe)
    assert config.model.name.startswith("vit_small_patch14_dinov2")
    assert config.teacher == (None if recipe == "scratch" else teacher)


def test_the_file_is_of_the_size_that_the_text_says_and_holds_what_it_says():
    path, text = ROOT / "results" / FILE, prose(CHAPTER)
    assert f"{path.stat().st_size / 1e6:.1f} MB" in text and path.stat().st_size < 8e6
    rows = read_class_rows(path)
    assert rows.train.shape == (2000, 12, 6, 17) and rows.test.shape == (1000, 12, 6, 17)
    for of in (rows.train, rows.test, *rows.students.values()):
        torch.testing.assert_close(of.sum(-1), torch.ones(of.shape[:-1]))
    assert rows.photographs.shape == (7, 3, 32, 32) and rows.photographs.dtype == torch.uint8
    # two airplanes, car, bird, cat, dog, horse
    assert rows.test_labels[rows.shown].tolist() == [0, 0, 1, 2, 3, 5, 7]
    assert set(rows.train_labels.tolist()) == set(range(10))


def test_what_it_says_of_a_linear_reader_is_so():
    """By a nearest mean: one row beats the student from scratch (32.7 %), and no layer holds it all."""
    rows = read_class_rows()

    def right(layers) -> float:
        known, asked = (x[:, layers].sqrt().flatten(1) for x in (rows.train, rows.test))
        spread = known.std(0) + 1e-6
        means = torch.stack([known[rows.train_labels == c].mean(0) for c in range(10)]) / spread
        return (torch.cdist(asked / spread, means).argmin(1) == rows.test_labels).double().mean().item()

    whole = right(range(12))
    assert whole > 0.35 and max(right([layer]) for layer in range(12)) < whole
    assert right([0]) > 0.15, "even layer 0 tells something"


def test_distilled_maps_are_nearer_to_the_teachers_than_those_from_scratch():
    rows = read_class_rows()
    far = {name: (of - rows.test[rows.shown]).abs().mean() for name, of in rows.students.items()}
    assert far["distill"] < 0.5 * far["scratch"]


# --- The class token's rows in a file


def rows_of(number: int, seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    return (3 * torch.randn(number, 2, 3, 5)).softmax(-1)


def test_8_bits_keep_shares_and_sums():
    rows = torch.cat([rows_of(50, 0), torch.eye(5)[None, None, :3].expand(1, 2, 3, 5)])
    again = from_8_bits(in_8_bits(rows))
    assert in_8_bits(rows).dtype == torch.uint8
    assert (again - rows).abs().max() < 0.006
    torch.testing.assert_close(again.sum(-1), torch.ones(51, 2, 3))
    assert torch.equal(again[-1], rows[-1]), "0 and 1 are kept as they are"


def test_a_file_is_read_as_it_was_written(tmp_path):
    written = ClassRows(
        rows_of(4, 1),
        torch.tensor([0, 3, 2, 9]),
        rows_of(3, 2),
        torch.tensor([1, 0, 5]),
        torch.randint(256, (2, 3, 8, 8), dtype=torch.uint8),
        torch.tensor([2, 0]),
        {"scratch": rows_of(2, 3), "distill": rows_of(2, 4)},
    )
    path = tmp_path / "deep" / "rows.safetensors"
    write_class_rows(path, written, "a test")
    read = read_class_rows(path)
    for name in ("train_labels", "test_labels", "photographs", "shown"):
        assert torch.equal(getattr(read, name), getattr(written, name)), name
    assert (read.train - written.train).abs().max() < 0.006
    assert list(read.students) == ["scratch", "distill"]
    assert (read.students["distill"] - written.students["distill"]).abs().max() < 0.006
