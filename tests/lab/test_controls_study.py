"""The study of controls: what stands in the place of the teacher's maps."""

import pytest
import torch

from atbook.lab.controls import CONTROLS
from atbook.worlds import glyphs
from atfamily.measures.controls import maps_of
from atlib.baselines import LogitDistillation
from tests.toy import sources as sources  # a fixture


def built(name, sources):
    return CONTROLS.variant(name).build(sources)


@pytest.mark.parametrize("split, size", [("train", 16), ("test", 40)])
def test_the_oracle_reads_the_named_glyph_and_every_patch_itself(sources, split, size):
    pair = built("oracle", sources)
    drawn = glyphs.generate(split, size, 0, sources.scale.world)
    images, _ = glyphs.glyph_images(drawn).take(range(size))
    for p in (seen.map for seen in pair.eval().walk(images).layers):
        assert p.shape == (size, 4, 17, 17)
        for image, cell in enumerate(drawn.cell):
            expected = torch.eye(17)
            expected[0] = torch.nn.functional.one_hot(torch.tensor(cell + 1), 17)
            assert torch.equal(p[image], expected.expand(4, -1, -1))


@pytest.mark.parametrize("how", ["copy", "distill"])
def test_a_jigsaw_moves_the_patches_of_the_teachers_maps_and_nothing_else(sources, how):
    pair = built(f"{how}, jigsaw", sources)
    assert (pair.plan.what, pair.plan.how) == ("map", how)
    images, _ = sources.scale.labelled(0).take(range(6))
    plain = maps_of(sources.teacher())(images)
    moved = {layer: seen.given for layer, seen in enumerate(pair.teacher_layers(images))}
    assert moved.keys() == plain.keys()
    for layer, p in moved.items():
        assert torch.equal(p[:, :, 0, 0], plain[layer][:, :, 0, 0]), "the class token stays"
        assert (p - plain[layer]).abs().max() > 1e-3
        for rows in (p, p.mT):  # the same numbers, elsewhere
            same = rows.flatten(2).sort(-1).values - plain[layer].flatten(2).sort(-1).values
            assert same.abs().max() == 0


@pytest.mark.parametrize("steps", [500, 800])
def test_answers_are_the_only_labels(sources, steps):
    variant = CONTROLS.variant(f"answers, {steps} steps")
    model = variant.build(sources)
    assert isinstance(model, LogitDistillation) and model.hard and variant.needs == ("fine-tuned",)
    recipe = variant.base(sources.scale, sources.place)
    assert (recipe.steps, recipe.task_weight, recipe.transfer_weight) == (steps, 0.0, 1.0)
    images = variant.images(sources.scale, 0)
    assert len(images) == 16 + 16 and (images.targets[16:] < 0).all()
    inputs, _ = images.take(range(8))
    logits, loss = model.train()(inputs)
    with torch.no_grad():
        labels = model.teacher(inputs).argmax(1)
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits, labels))
