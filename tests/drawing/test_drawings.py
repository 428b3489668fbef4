"""The drawings say what is true of worlds and models, and those of records are what the code draws."""

import re
from xml.etree import ElementTree

import pytest
import torch

from atbook.drawing import drawings, seen
from atbook.drawing.pictograms import ROWS, photograph, pictograms
from atbook.drawing.ruler import RULERS
from atbook.lab.findings import SCRATCH
from atbook.lab.verdicts import Estimate, accuracies
from tools.drawings import FOLDER

DRAWN = {file.name: file.read_text(encoding="utf-8") for file in sorted(FOLDER.glob("*.svg"))}


def test_the_files_of_records_and_models_are_what_the_code_draws():
    changed = [name for name, text in drawings() if DRAWN.get(name) != text]
    assert changed == [], "draw them anew: make drawings"


@pytest.mark.parametrize("name", DRAWN)
def test_letters_are_large_enough_for_a_phone_and_the_file_needs_nothing_else(name):
    root = ElementTree.fromstring(DRAWN[name])
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    sizes = [float(size) for size in re.findall(r'font-size="([\d.]+)"', DRAWN[name])]
    assert sizes and min(sizes) * 341 / width > 11  # 341 pixels: the column of text on a phone of 390
    assert root[0].tag.endswith("title") and len(root[0].text) > 40
    assert not re.search(r'href|url\(|\bid="', DRAWN[name].replace("http://www.w3.org/2000/svg", ""))
    for text in root.iter("{http://www.w3.org/2000/svg}text"):
        assert 0 <= float(text.attrib["x"]) <= width and 0 < float(text.attrib["y"]) < height


def test_the_numbers_of_attention_are_those_that_torch_computes():
    """From the squares of its queries, keys and values, a third full for each 1."""

    def squares(colour):
        found = re.findall(rf'height="11" fill="{colour}" fill-opacity="([\d.]+)"', DRAWN["attention.svg"])
        return torch.tensor([float(share) for share in found]).view(-1, 4)

    (q,), k = ((3 * squares(colour)).round() / 1.5 for colour in ("#E69F00", "#B8860B"))
    *v, output = squares("#8B5A00")
    (row,) = torch.nn.functional.scaled_dot_product_attention(q[None, None], k[None], torch.eye(5)[None])[0]
    words = re.findall(r">([\d.]+)</text>", DRAWN["attention.svg"])
    assert [f"{share:.2f}" for share in row] == [word for word in words if len(word) == 4]
    assert [f"{score:.1f}" for score in k @ q / 2] == [word for word in words if len(word) == 3]
    assert output.tolist() == pytest.approx((row @ torch.stack(v)).tolist(), abs=0.01)


def test_the_students_answer_as_the_drawings_say():
    image, twin = seen.scene(), seen.scene("routing")
    assert seen.answer("copy", image, twin) == seen.answer("copy", image, image) == image.shape
    misled = seen.answer("copy", image, seen.scene("message"))
    assert misled != image.shape and f"It answers: {misled} ✗" in DRAWN["twin-message.svg"]
    (answer,) = re.findall(r">It answers: (\w+) (.)</text>", DRAWN["twin.svg"])
    assert answer == (image.shape, "✓")
    assert seen.answer("scratch", image) != image.shape


@pytest.mark.parametrize("name", RULERS)
def test_a_ruler_says_what_was_recorded_and_has_each_method_at_its_place(name):
    drawn = DRAWN[f"ruler-{name}.svg"]
    said = [float(share) for share in re.findall(r">[^<>]* ([\d.]+) %<", drawn)]
    places = [float(x) for x in re.findall(r'<circle cx="([\d.]+)"', drawn)]
    ticks = [map(float, ends) for ends in re.findall(r'd="M([\d.]+) [\d.]+v14M([\d.]+) ', drawn)]
    expected, shares = [], []
    for line, (start, end) in zip(RULERS[name], ticks, strict=True):
        of = {"scratch": SCRATCH} if line.study == "transfer" else {}
        ends = accuracies(line.study, line.scale, of)
        low, high = ends["scratch"].mean, ends["fine-tune"].mean
        means = [accuracies(mark.study or line.study, line.scale)[mark.method].mean for mark in line.marks]
        expected += [low, high, *means]
        shares += [start + (end - start) * (mean - low) / (high - low) for mean in means]
    assert said == [pytest.approx(100 * mean, abs=0.0501) for mean in expected]
    assert places == pytest.approx(shares, abs=0.1)


def test_the_strip_says_how_much_of_the_attention_the_key_and_the_glyph_get():
    """The weights of the head that looks there most, from the model itself."""
    image, words = seen.scene(), re.findall(r">(?:key|glyph) ([\d.]+)<", DRAWN["looks.svg"])
    expected = [p[:, 0, 1 + cell].max() for p in image.maps for cell in (image.key, image.cell)]
    assert [float(word) for word in words] == pytest.approx(expected, abs=0.0051)


def test_the_jigsaw_points_to_another_cell_than_the_map():
    veil = re.findall(r'<path d="M(\d+) (\d+)h37', DRAWN["jigsaw.svg"])
    cells = [(int(x) >= 208, (int(x) - 4) % 204 // 37 + 4 * ((int(y) - 54) // 37)) for x, y in veil]
    (left,), (right,) = ({*range(16)} - {cell for there, cell in cells if there == side} for side in (0, 1))
    assert left == seen.scene().cell != right


def test_the_pictograms_have_the_numbers_that_they_are_given():
    means = {method: 0.2 + 0.1 * row for row, method in enumerate(ROWS)}
    of = {name: Estimate(mean, mean, mean, 0.0, 2, 4000, (mean, mean)) for name, mean in means.items()}
    of["copy"] = Estimate(0.6, 0.2, 0.9, 0.0, 3, 4000, (0.9, 0.1, 0.8))  # two groups
    words = re.findall(r">([^<>]+)</text>", pictograms("find", of))
    shown = [word for word in words if re.fullmatch(r"[\d.]+ %", word)]
    assert shown == [f"{100 * mean:.1f} %" for name, mean in means.items() if name != "copy"]
    assert "2 seeds: 80 to 90 %" in words and "1 seed: 10 %" in words


@pytest.mark.parametrize("task", ["find", "match"])
def test_twins_share_what_they_should_and_maps_look_where_they_should(task):
    image, routing, message = (seen.scene(twin, task) for twin in (None, "routing", "message"))
    assert image.cell == routing.cell != message.cell and routing.shape != image.shape == message.shape
    assert image.key == routing.key
    for sees in (image, routing, message):
        assert sees.looks(3).argmax() == sees.cell
        if task == "match":  # what is drawn
            assert sees.looks(1).argmax() == sees.key and min(sees.looks(1).max(), sees.looks(3).max()) > 0.9
    assert photograph(image.image, image.looks(3)).count("<img ") == 3
