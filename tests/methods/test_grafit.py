"""Grafit's losses against loops, its memory, its slow copy, and what of it learns."""

import math

import pytest
import torch
from torch import nn

from atfamily.grafit import NOT_SEEN, Grafit, grafit_loss, instance_loss, knn_loss, numbered, snca_loss
from atlib.data import UNLABELLED, Images
from atlib.losses import noted
from atlib.recipe import Recipe
from atlib.train import train
from tests.helpers import random_images, tiny


def turned(images):
    """A view that is drawn: half of them upside down."""
    return torch.where(torch.rand(len(images), 1, 1, 1) < 0.5, images, images.flip(2))


def unit(*shape, seed=0):
    return nn.functional.normalize(random_images(*shape, seed=seed, dtype=torch.float64), dim=1)


def some_images(n=24, classes=3):
    pixels = (random_images(n, 3, 32, 32) * 40 + 128).clamp(0, 255).to(torch.uint8)
    return Images(pixels, torch.arange(n) % classes)


def grafit(trunk=None, **options):
    torch.manual_seed(1)
    return Grafit(tiny(num_classes=3) if trunk is None else trunk, turned, 24, **options)


def step(model, start=0, size=8):
    images, targets = numbered(some_images()).take(range(start, start + size))
    return model(images, *targets.unbind(1))


# --- The losses


def test_the_loss_of_neighbours_is_that_of_a_loop():
    x, memory, temperature = unit(5, 6), unit(12, 6, seed=1), 0.3
    of_memory = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, NOT_SEEN, NOT_SEEN, 2, 0])
    numbers, labels = torch.tensor([0, 4, 2, 8, 11]), torch.tensor([0, 1, 2, 1, 0])
    losses = []
    for own, label, number in zip(x.tolist(), labels.tolist(), numbers.tolist()):
        weights = {
            j: math.exp(sum(a * b for a, b in zip(own, other)) / temperature)
            for j, other in enumerate(memory.tolist())
            if j != number and of_memory[j] != NOT_SEEN
        }
        same = sum(weight for j, weight in weights.items() if of_memory[j] == label)
        losses.append(-math.log(same / sum(weights.values())))
    loss = knn_loss(x, labels, numbers, memory, of_memory, temperature)
    assert loss.item() == pytest.approx(sum(losses) / 5, abs=1e-12)


def test_without_neighbours_there_is_nothing_to_learn():
    x = unit(2, 4).requires_grad_()
    empty = torch.full((5,), NOT_SEEN)
    loss = knn_loss(x, torch.tensor([0, 1]), torch.tensor([0, 1]), unit(5, 4, seed=1), empty)
    loss.backward()
    assert loss == 0 and (x.grad == 0).all()
    lonely = torch.tensor([NOT_SEEN, NOT_SEEN, 0, 0, NOT_SEEN])  # of label 1 there is none
    x, counted, memory = unit(2, 4), torch.tensor([0, 1]), unit(5, 4, seed=1)
    both, one = (knn_loss(x[:n], counted[:n], counted[:n], memory, lonely) for n in (2, 1))
    assert torch.isfinite(both) and torch.equal(both, one)
    unknown = torch.tensor([UNLABELLED, UNLABELLED, 0, 0, UNLABELLED])  # no class of its own
    assert torch.equal(knn_loss(x, torch.tensor([0, UNLABELLED]), counted, memory, unknown), one)


def test_the_instance_loss_is_a_distance_of_directions_and_its_target_a_constant():
    x, target = random_images(4, 5).requires_grad_(), random_images(4, 5, seed=1).requires_grad_()
    loss = instance_loss(x, target)
    apart = nn.functional.normalize(x, dim=1) - nn.functional.normalize(target, dim=1)
    expected = apart.square().sum(1).mean() / 2  # BYOL's form of it, halved
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    loss.backward()
    assert target.grad is None and x.grad.abs().max() > 0


# --- The memory and the slow copy


def test_the_memory_has_what_was_projected_under_its_number():
    model = grafit()
    step(model)
    assert (model.labels[:8] == torch.arange(8) % 3).all() and (model.labels[8:] == NOT_SEEN).all()
    assert torch.allclose(model.memory[:8].norm(dim=1), torch.ones(8), atol=1e-5)
    assert (model.memory[8:] == 0).all() and model.memory.grad_fn is None
    before = model.memory.clone()
    step(model, start=4)
    assert torch.equal(model.memory[:4], before[:4]) and not torch.equal(model.memory[4:8], before[4:8])


def test_evaluation_remembers_nothing_and_moves_nothing():
    model = grafit().eval()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    step(model)
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())


def test_the_slow_copy_follows_by_its_momentum():
    model = grafit(momentum=0.9)
    slow = {name: x.clone() for name, x in model.slow_trunk.named_parameters()}
    with torch.no_grad():
        for parameter in model.trunk.parameters():
            parameter.add_(1.0)
    step(model)
    for name, parameter in model.slow_trunk.named_parameters():
        assert torch.allclose(parameter, slow[name] + 0.1, atol=1e-5)
    assert not model.slow_trunk.training and model.trunk.training


def test_what_learns_from_which_loss():
    model = grafit()
    step(model)
    of_neighbours, of_views = step(model, start=8)
    of_views.backward(retain_graph=True)
    assert model.predictor[0].weight.grad.abs().max() > 0 and model.trunk.patch_embed.proj.weight.grad.any()
    assert all(p.grad is None for p in (*model.slow_trunk.parameters(), *model.slow_projector.parameters()))
    model.zero_grad()
    of_neighbours.backward()
    assert all(p.grad is None or not p.grad.any() for p in model.predictor.parameters())
    assert model.projector[0].weight.grad.abs().max() > 0


def test_the_losses_are_weighed_and_noted():
    model, images = grafit().eval(), numbered(some_images())
    model.labels.copy_(images.targets[:, 0])
    model.memory.copy_(unit(24, 64).float())
    batch, targets = images.take(range(8))
    recipe = Recipe(task_weight=2.0, transfer_weight=0.5)
    torch.manual_seed(4)
    with noted() as parts:
        loss = grafit_loss(model, batch, targets, recipe)
    assert loss.item() == pytest.approx(2 * parts["knn_loss"].item() + 0.5 * parts["instance_loss"].item())
    torch.manual_seed(4)
    assert snca_loss(model, batch, targets, recipe).item() == pytest.approx(2 * parts["knn_loss"].item())


@pytest.mark.parametrize("loss", [grafit_loss, snca_loss])
def test_a_step_is_one_call(loss):
    """In parts, what a part has written into the memory would be the next one's neighbours."""
    recipe = Recipe(steps=2, batch_size=8, accumulate=2)
    with pytest.raises(ValueError):
        train(grafit(), numbered(some_images()), recipe, loss=loss, progress=None, cpu=True)
