"""Features, neighbours and linear probes: against loops, separable data, and steps by hand."""

import math
from operator import mul

import pytest
import torch
from torch import nn

from atfamily.measures.probes import features, knn_accuracy, linear_probe, mlp_probe


@pytest.fixture
def images(glyphs64):
    return glyphs64.select(range(7))


def test_a_hidden_layer_reads_what_no_linear_probe_can():
    """Exclusive or of the signs of two features, among others that say nothing."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1500, 5, generator=generator)
    y = ((x[:, 0] > 0) ^ (x[:, 1] > 0)).long()
    before = torch.get_rng_state()
    accuracy = mlp_probe(x[:1000], y[:1000], x[1000:], y[1000:])
    assert accuracy == mlp_probe(x[:1000], y[:1000], x[1000:], y[1000:]) > 0.9
    assert torch.equal(torch.get_rng_state(), before)
    linear = linear_probe(x[:1000], y[:1000], x[:1000], y[:1000], x[1000:], y[1000:], steps=100)
    assert linear.test_accuracy < 0.6
    shuffled = y[torch.randperm(1500, generator=generator)]
    assert mlp_probe(x[:1000], shuffled[:1000], x[1000:], shuffled[1000:]) < 0.6, "chance where nothing is"


@pytest.mark.parametrize("config", [{"reg_tokens": 2}, {"global_pool": "avg", "class_token": False}])
def test_features_are_what_the_head_reads(small_vit, images, config):
    model = small_vit(0, drop_rate=0.5, **config).train()
    read = features(model, images, batch_size=3)
    assert model.training and not read.requires_grad
    heard = []
    model.head.register_forward_pre_hook(lambda module, inputs: heard.append(inputs[0].detach()))
    model.eval()(images.take(range(7))[0])
    torch.testing.assert_close(read, heard[0], rtol=1e-5, atol=1e-5)


def test_features_of_a_layer_are_those_of_the_model_cut_off_there(small_vit, images):
    model = small_vit()
    read = features(model, images, layer=1)
    model.blocks = model.blocks[:2]
    model.head = nn.Identity()
    torch.testing.assert_close(read, model.eval()(images.take(range(7))[0]).detach(), rtol=1e-5, atol=1e-5)


def longhand_knn(train_x, train_y, test_x, test_y, k):
    """Neighbours one image at a time, votes in a dictionary."""
    right = 0
    for x, y in zip(test_x.tolist(), test_y.tolist()):
        products = [(sum(map(mul, x, other)), math.hypot(*other)) for other in train_x.tolist()]
        cosines = [product / math.hypot(*x) / length for product, length in products]
        votes = {}
        for similarity, label in sorted(zip(cosines, train_y.tolist()), reverse=True)[:k]:
            votes[label] = votes.get(label, 0) + math.exp(similarity / 0.07)
        right += max(votes, key=votes.get) == y
    return right / len(test_y)


def clusters(n, seed, spread=0.8, classes=4, width=6):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % classes
    centres = torch.randn(classes, width, generator=torch.Generator().manual_seed(99))
    return centres[labels] + spread * torch.randn(n, width, generator=generator), labels


def test_neighbours_against_loops(monkeypatch):
    (train_x, train_y), (test_x, test_y) = clusters(40, 0), clusters(30, 1)
    ks = (1, 2, 7, 40)
    expected = {k: longhand_knn(train_x, train_y, test_x, test_y, k) for k in ks}
    assert len(set(expected.values())) > 1 and 0.3 < min(expected.values())
    assert knn_accuracy(train_x, train_y, test_x, test_y, ks) == pytest.approx(expected)
    monkeypatch.setattr("atfamily.measures.probes.BLOCK", 100)  # two test images at a time
    assert knn_accuracy(train_x, train_y, test_x, test_y, ks) == pytest.approx(expected)


def test_features_are_standardised_by_the_training_set():
    def probe(*sets):
        return linear_probe(*(tensor for x_and_y in sets for tensor in x_and_y), lrs=(0.1,), steps=60)

    train, (x, y), test = clusters(100, 0), clusters(60, 1), clusters(60, 2)
    plain = probe(train, (x, y), test)
    scale, shift = torch.tensor([1e-3, 1, 1e3, 5, 1, 1]), torch.tensor([0, 100.0, 0, 0, 7, 0])
    # and a constant feature
    moved = [
        (torch.cat([features * scale + shift, torch.full((len(features), 1), 3.0)], 1), labels)
        for features, labels in (train, (x, y), test)
    ]
    assert probe(*moved).test_accuracy == pytest.approx(plain.test_accuracy, abs=1 / 60 + 1e-9)
    assert plain.test_accuracy > 0.6
    # A shifted validation set is measured as it is.
    assert probe(train, (x + 5, y), test).validation_accuracies != plain.validation_accuracies


def test_the_rate_is_chosen_on_validation_and_rates_do_not_touch_each_other():
    train, validation, test = clusters(100, 0), clusters(61, 1), clusters(67, 2)
    lrs, settings = (0.1, 1e-5, 0.01), dict(steps=30, batch_size=16, seed=3)
    together = linear_probe(*train, *validation, *test, lrs=lrs, **settings)
    alone = {lr: linear_probe(*train, *validation, *test, lrs=(lr,), **settings) for lr in lrs}
    accuracies = together.validation_accuracies
    assert accuracies == {lr: one.validation_accuracies[lr] for lr, one in alone.items()}
    assert together.lr == min(lr for lr in lrs if accuracies[lr] == max(accuracies.values()))
    assert together.test_accuracy == alone[together.lr].test_accuracy


@pytest.mark.parametrize("adaptive, lr", [(True, 5.0), (False, 0.1)], ids=["lars", "sgd"])
def test_a_probes_steps_by_hand(adaptive, lr):
    """Full batches, so that every step is known; LARS scales those of the weights alone."""
    x, y = clusters(60, 0)
    sets = (x, y, x, y, x, y)
    settings = {"lrs": (lr,), "steps": 30, "batch_size": 60, "adaptive": adaptive}
    found = linear_probe(*sets, **settings)
    standardised = (x - x.mean(0)) / x.std(0)
    classes = int(y.max()) + 1
    W = 0.01 * torch.randn(classes, x.shape[1], generator=torch.Generator().manual_seed(0)) * adaptive
    b, momentum = torch.zeros(classes), [torch.zeros_like(W), torch.zeros(classes)]
    for step in range(30):
        p = (standardised @ W.T + b).softmax(1) - torch.nn.functional.one_hot(y, classes)
        steps = [p.T @ standardised / len(x), p.mean(0)]
        if adaptive:
            steps[0] = steps[0] * 0.001 * W.norm() / (steps[0].norm() + 1e-8)
        momentum = [0.9 * old + new for old, new in zip(momentum, steps)]
        rate = lr * 0.5 * (1 + math.cos(math.pi * step / 30))
        W, b = W - rate * momentum[0], b - rate * momentum[1]
    expected = ((standardised @ W.T + b).argmax(1) == y).double().mean().item()
    assert found.test_accuracy == pytest.approx(expected) and found == linear_probe(*sets, **settings)
    assert expected > 0.3, "guessing has a quarter"
