"""Copying a group's mean map: means against a loop, what the student uses, groups without images."""

import pytest
import torch

from atfamily.stored_maps import load_stored_maps, save_stored_maps
from atlib import walk
from atlib.analysis import walks
from atlib.attention import Instead
from atlib.baselines import MeanMapCopy, mean_maps
from atlib.data import Images
from atlib.pair import Normalisation
from atlib.vit import Architecture
from tests.helpers import random_images


def parity(images):
    """Three groups that an image's own pixels decide."""
    return (images.flatten(1).sum(1).abs() * 10).long() % 3


@pytest.fixture
def images():
    return random_images(30, 3, 32, 32)


def test_means_equal_a_loop(small_vit, images):
    vit = small_vit(seed=1)
    found = mean_maps(vit, images.split(7), parity, 3)
    groups = parity(images).tolist()
    for layer, maps in enumerate(found):
        for group in range(3):
            of_group = [walk(vit, images[[i]]).layers[layer].map[0] for i in range(30) if groups[i] == group]
            torch.testing.assert_close(maps[group], sum(of_group) / len(of_group), rtol=1e-5, atol=1e-6)


def test_the_student_uses_its_groups_map(small_vit, images):
    teacher, student = small_vit(seed=1), small_vit(seed=2)
    pair = MeanMapCopy(teacher, student, images, parity, 3)
    maps, groups = mean_maps(teacher, images, parity, 3), parity(images)
    expected = walk(student, images, replace={i: Instead(map=maps[i][groups]) for i in range(3)}).logits
    found = pair(images)
    torch.testing.assert_close(found.logits, expected)
    assert found.transfer_loss == 0
    found.logits.sum().backward()
    assert {name.split(".")[0] for name, _ in pair.named_parameters()} == {"student"}
    assert student.blocks[0].attn.qkv.weight.grad[:48].abs().sum() == 0, "its own q and k are not used"
    seen = pair.walk(images)  # an analysis must see the group's mean maps, not the student's
    for layer in range(3):
        torch.testing.assert_close(seen.layers[layer].map, maps[layer][groups])
    assert torch.equal(seen.logits, pair(images).logits)
    ((streamed,),) = walks([pair], Images(torch.zeros(4, 3, 32, 32, dtype=torch.uint8), torch.zeros(4)), 4)
    blank = torch.full((1, 3, 32, 32), -2.0)
    torch.testing.assert_close(streamed.layers[0].map[0], maps[0][parity(blank)][0])


def test_stored_maps_say_what_images_they_are_for(small_vit, tmp_path):
    told, vit = Normalisation(0.3, 0.2), Architecture("glyphs", {"depth": 2})
    model = MeanMapCopy(vit.build(), vit.build(), random_images(4, 3, 32, 32), normalisation=told)
    path = save_stored_maps(tmp_path / "maps.safetensors", model, vit)
    assert load_stored_maps(path).normalisation == told


def test_many_maps_in_half_precision_have_the_mean_of_few(small_vit):
    vit = small_vit().bfloat16()
    image = random_images(1, 3, 32, 32).bfloat16()
    one, many = (mean_maps(vit, image.expand(count, -1, -1, -1)) for count in (1, 700))
    for p, of_many in zip(one, many):
        torch.testing.assert_close(of_many, p, rtol=1e-3, atol=1e-3)
