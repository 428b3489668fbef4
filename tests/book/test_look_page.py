"""What "Look at any ViT" says of its own example."""

import torch

from atbook.records import results_folder
from atbook.worlds import glyph_images
from atbook.worlds.glyphs import generate
from atlib import walk
from atlib.checkpoint import load_vit


def test_the_teacher_looks_at_the_mark_and_the_student_elsewhere_and_is_wrong():
    drawn = generate("test", 2)
    images, labels = glyph_images(drawn).take([1])

    def walked(name):
        weights = results_folder() / "transfer" / "find" / f"{name}-seed0.safetensors"
        with torch.no_grad():
            seen = walk(load_vit(weights).eval(), images)
        return seen.layers[-1].map.mean(1)[0, 0, 1:], seen.logits

    marked = int(drawn.cell[1])
    theirs, _ = walked("teacher")
    own, logits = walked("scratch")
    assert theirs.argmax() == marked and theirs[marked] > 0.5
    assert own.argmax() != marked and own[marked] < 0.1
    assert logits.argmax(-1) != labels
