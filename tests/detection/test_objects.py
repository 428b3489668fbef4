"""Objects of a batch are divided and moved as tensors are, and what nothing could learn from is refused."""

import pytest
import torch

from atbook.worlds.glyphs import SHAPES
from atbook.worlds.scenes import SceneWorld, generate_scenes, scene_objects
from atfamily.detection.objects import ObjectBatch, ObjectImages, Objects, check_objects
from atlib.loading import ShardSpec, epoch_order


def objects(boxes=((1, 2, 5, 8), (0, 0, 20, 10)), labels=(0, 3), masks=None, crowd=(False, False)):
    labels = labels if isinstance(labels, torch.Tensor) else torch.tensor(labels, dtype=torch.int64)
    return Objects(torch.tensor(boxes, dtype=torch.float32), labels, masks, torch.tensor(crowd))


def numbered(count):
    """Each image's objects say which it is."""
    return [objects(labels=(number, number)) for number in range(count)]


def numbers(batch):
    return [scene.labels[0].item() for scene in batch]


@pytest.mark.parametrize("count, parts", [(2, 5), (8, 3)])
def test_a_batch_is_split_as_a_tensor(count, parts):
    batch = ObjectBatch(numbered(count))
    expected = [part.tolist() for part in torch.arange(count).tensor_split(parts)]
    assert [numbers(part) for part in batch.tensor_split(parts)] == expected
    assert all(isinstance(part, ObjectBatch) for part in batch.tensor_split(parts))


NARROW = torch.zeros(2, 10, 19, dtype=torch.bool)
WRONG = [objects(boxes=((1, 2, 5, 8), (3, 4, right, 9))) for right in (3, float("nan"), 20.5)]
WRONG += [objects(labels=(0,)), objects(labels=(0, -1)), objects(masks=NARROW)]


@pytest.mark.parametrize("wrong", WRONG)
def test_what_nothing_could_learn_from_is_refused(wrong):
    with pytest.raises(ValueError):
        check_objects(wrong, 10, 20, "one.jpg")
    with pytest.raises(ValueError):
        ObjectImages(torch.zeros(2, 3, 10, 20, dtype=torch.uint8), [objects(), wrong])


@pytest.fixture(scope="module")
def images():
    """Each image has one level, its number."""
    pixels = torch.arange(11, dtype=torch.uint8)[:, None, None, None].expand(11, 3, 10, 20).contiguous()
    return ObjectImages(pixels, numbered(11), mean=0.0, std=1 / 255)


def test_an_epoch_has_every_image_once_over_two_processes(images):
    part = ShardSpec(3, 2, 4)
    alone = list(images.epoch(part))
    two = [list(images.epoch(part._replace(rank=rank, world=2), workers=2)) for rank in range(2)]
    assert [index for batch in alone for index in batch.indices] == epoch_order(11, 3, 2)
    for step, (whole, *shares) in enumerate(zip(alone, *two, strict=True)):
        for rank, share in enumerate(shares):
            assert share.indices == whole.indices[rank::2]
            assert numbers(share.targets) == share.images[:, 0, 0, 0].round().int().tolist() == share.indices
            assert share.weight == pytest.approx(len(share.indices) * 2 / len(whole.indices)), step
    rest = list(images.epoch(part._replace(start=1)))
    assert [batch.indices for batch in rest] == [batch.indices for batch in alone[1:]]


def test_the_loader_has_all_in_order(images):
    batches = list(images.loader(4))
    assert [numbers(objects) for _, objects in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
    assert torch.cat([pixels for pixels, _ in batches])[:, 0, 0, 0].round().tolist() == list(range(11))
    plain = ObjectImages(images.pixels, images.objects)
    assert torch.allclose(plain.take([5])[0], torch.full((1, 3, 10, 20), (5 / 255 - 0.5) / 0.25))


def test_scenes_are_objects_with_their_pixels():
    """Masks tile what is not background, boxes hold them, classes are those drawn."""
    drawn = generate_scenes("train", 30, world=SceneWorld(overlap=0.3))
    made = scene_objects(drawn)
    assert len(made) == 30 and made.classes == SHAPES
    for number, scene in enumerate(made.objects):
        assert (scene.masks.sum(0).numpy() == (drawn.instances[number] > 0)).all(), "no pixel has two owners"
        assert scene.labels.tolist() == [shape for shape in drawn.shape[number] if shape >= 0]
        assert not scene.crowd.any()
        for box, mask in zip(scene.boxes.tolist(), scene.masks):
            down, across = mask.nonzero().unbind(1)
            assert box == [across.min(), down.min(), across.max() + 1, down.max() + 1]
