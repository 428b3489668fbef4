"""What page D2 writes out, where a class token looks and a student of two teachers, is what atlib
computes, on other inputs."""

import torch

from atbook.lab.studies import PRETRAINING
from atbook.lab.study import Sources
from atbook.worlds import glyphs
from atlib import Plan, walk
from tests import toy
from tests.book.test_taught import small_vit, taught

NAME = "when-are-features-needed"


def test_looks_are_entries_of_the_maps():
    vit = small_vit(0, depth=2)
    drawn = glyphs.generate("train", 20, seed=3)
    images = torch.from_numpy(drawn.images).float() / 255
    on_cell, on_itself = taught(NAME).looks(vit, images, torch.from_numpy(drawn.cell))
    with torch.no_grad():
        layers = walk(vit, images).layers
    assert on_cell.shape == on_itself.shape == (20, 2, layers[0].map.shape[1])
    for layer, seen in enumerate(layers):
        for image, cell in enumerate(drawn.cell):
            assert torch.equal(on_cell[image, layer], seen.map[image, :, 0, 1 + cell])
            assert torch.equal(on_itself[image, layer], seen.map[image, :, 0, 0])


def test_mixed_is_what_the_study_trains(tmp_path):
    place = toy.place(tmp_path)
    toy.untrained_models(place, PRETRAINING.teachers)
    sources = Sources(place, toy.TOY, 0)
    theirs = PRETRAINING.variant("useless features, useful routing").build(sources)
    features, routing = sources.teacher(PRETRAINING.teachers[0]), sources.teacher()
    before = {name: value.clone() for name, value in features.state_dict().items()}
    ours = taught(NAME).mixed(features, routing)
    ours.student.head.load_state_dict(theirs.student.head.state_dict())
    assert ours.plan == theirs.plan == Plan()
    learn = [{n for n, p in pair.named_parameters() if p.requires_grad} for pair in (ours, theirs)]
    assert learn[0] == learn[1] and learn[0]
    images = torch.rand(3, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(ours.eval()(images).logits, theirs.eval()(images).logits)
    assert all(torch.equal(before[name], value) for name, value in features.state_dict().items())
