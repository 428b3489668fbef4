"""What "Look at any ViT" says of its own example."""

import torch

from atbook.records import results_folder
from atbook.worlds import glyph_images
from atbook.worlds.glyphs import generate
from atlib import walk
from atlib.checkpoint import load_vit
from tests.helpers import ROOT


def test_both_look_at_the_mark_and_the_student_is_wrong():
    drawn = generate("test", 2)
    images, labels = glyph_images(drawn).take([1])

    def walked(name):
        weights = results_folder() / "transfer" / "find" / f"{name}-seed0.safetensors"
        with torch.no_grad():
            seen = walk(load_vit(weights).eval(), images)
        return [layer.map.mean(1)[0, 0, 1:] for layer in seen.layers], seen.logits

    marked = int(drawn.cell[1])
    of_teacher, _ = walked("teacher")
    of_student, logits = walked("scratch")
    assert all(row.argmax() == marked and row[marked] > 0.5 for row in of_teacher)
    assert all(of_student[layer].argmax() == marked for layer in (1, 2))
    shares = [f"{of_student[layer][marked]:.2f}" for layer in (1, 2)]
    page = (ROOT / "book" / "look.md").read_text(encoding="utf-8")
    assert "shares of {} and {}".format(*shares) in page
    assert logits.argmax(-1) != labels
