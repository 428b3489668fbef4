"""ViTs whose blocks FSDP2 divides, the usual way: `fully_shard(block)`, then the whole. One process, gloo."""

import copy

import pytest
import torch
from packaging.version import Version
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from atlib import AttentionTransfer, Plan, create_vit
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


def divided(vit, mesh, root=False):
    vit = copy.deepcopy(vit)
    for block in vit.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(vit, mesh=mesh) if root else vit


def assert_gradients(vit, plain):
    for (name, weight), expected in zip(vit.named_parameters(), plain.parameters()):
        found = weight.grad.full_tensor() if hasattr(weight.grad, "full_tensor") else weight.grad
        torch.testing.assert_close(found, expected.grad, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("how", ["copy", "distill"])
def test_a_pair_steps_as_the_whole_one(mesh, how):
    """The teacher's blocks may be divided too."""
    models = [randomise(create_vit(SMALL_VIT), seed) for seed in (0, 1)]
    parts = [divided(vit, mesh) for vit in models]
    pairs = [AttentionTransfer(*vits, Plan(how=how)) for vits in (models, parts)]
    losses = []
    for pair in pairs:
        logits, transfer_loss = pair(IMAGES)
        losses.append(logits.square().sum() + transfer_loss)
        losses[-1].backward()
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-5)
    assert_gradients(pairs[1].student, pairs[0].student)
