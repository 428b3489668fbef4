"""ViTs whose blocks FSDP2 divides, the usual way: `fully_shard(block)`, then the whole. One process, gloo."""

import copy

import pytest
import torch
from packaging.version import Version
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from atlib import AttentionTransfer, Plan, create_vit, walk
from tests.helpers import SMALL_VIT, random_images, randomise

pytestmark = pytest.mark.skipif(
    Version(torch.__version__) < Version("2.8"), reason="torch itself divides weights on a CPU since 2.8"
)

IMAGES = random_images(4, 3, 32, 32)


@pytest.fixture
def mesh(tmp_path):
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def divided(vit, mesh):
    for block in vit.blocks:
        fully_shard(block, mesh=mesh)
    return vit


def whole(weights):
    return {
        key: value.full_tensor() if hasattr(value, "full_tensor") else value for key, value in weights.items()
    }


def gradients(vit):
    return whole({key: weight.grad for key, weight in vit.named_parameters() if weight.grad is not None})


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("root", [False, True])
def test_the_walk_and_its_gradients_are_those_of_the_whole_model(mesh, root, checkpointing):
    plain = randomise(create_vit(SMALL_VIT))
    vit = divided(copy.deepcopy(plain), mesh)
    vit = fully_shard(vit, mesh=mesh) if root else vit
    vit.set_grad_checkpointing(checkpointing)
    expected, found = walk(plain, IMAGES), walk(vit, IMAGES)
    torch.testing.assert_close(found.logits, expected.logits)
    torch.testing.assert_close(found.layers[1].map, expected.layers[1].map)
    for seen in (expected, found):
        (seen.logits.square().sum() + seen.layers[1].map.square().sum()).backward()
    torch.testing.assert_close(gradients(vit), gradients(plain), rtol=1e-4, atol=1e-6)
    assert "forward" not in vars(vit.blocks[0]) and "forward" not in vars(vit)


@pytest.mark.parametrize("how", ["copy", "distill"])
def test_a_pair_steps_as_the_whole_one(mesh, how):
    teacher, plain = randomise(create_vit(SMALL_VIT)), randomise(create_vit(SMALL_VIT), seed=1)
    student = divided(copy.deepcopy(plain), mesh)
    # the teacher's blocks may be divided too
    pairs = (
        AttentionTransfer(copy.deepcopy(teacher), plain, Plan(how=how)),
        AttentionTransfer(divided(teacher, mesh), student, Plan(how=how)),
    )
    losses = []
    for pair in pairs:
        logits, transfer_loss = pair(IMAGES)
        loss = logits.square().sum() + transfer_loss
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    torch.testing.assert_close(gradients(student), gradients(plain), rtol=1e-4, atol=1e-5)
