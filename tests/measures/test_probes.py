"""Features, neighbours and linear probes: against loops, separable data, NumPy's own solver of the same
problem."""

import math
import re
from operator import mul

import numpy as np
import pytest
import torch
from torch import nn

from atfamily.measures.probes import features, knn_accuracy, linear_probe, mlp_probe
from atlib import AttentionTransfer, Plan, walk
from atlib.attention import Instead


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
    with pytest.raises(ValueError, match=r"\[1\]"):
        mlp_probe(x[:9], y[:9] * 0 + torch.arange(9) % 2 * 2, x[:9], y[:9] * 0 + 1)


@pytest.mark.parametrize(
    "config", [{}, {"global_pool": "avg"}, {"reg_tokens": 2}, {"global_pool": "avg", "class_token": False}]
)
def test_features_are_what_the_head_reads(small_vit, images, config):
    model = small_vit(0, drop_rate=0.5, **config).train()
    read = features(model, images, batch_size=3)
    assert model.training and not read.requires_grad
    heard = []
    model.head.register_forward_pre_hook(lambda module, inputs: heard.append(inputs[0].detach()))
    model.eval()(images.take(range(7))[0])
    torch.testing.assert_close(read, heard[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_features_of_a_layer_are_those_of_the_model_cut_off_there(small_vit, images, layer):
    model = small_vit()
    read = features(model, images, layer=layer)
    model.blocks = model.blocks[: layer + 1]
    model.head = nn.Identity()
    torch.testing.assert_close(read, model.eval()(images.take(range(7))[0]).detach(), rtol=1e-5, atol=1e-5)


def test_a_copying_student_is_probed_with_its_teacher(small_vit, images):
    teacher, student = small_vit(1), small_vit(2)
    read = features(AttentionTransfer(teacher, student, Plan(how="copy")), images)
    assert not torch.allclose(read, features(student, images), rtol=1e-2)
    batch = images.take(range(7))[0]
    maps = {i: Instead(map=layer.map) for i, layer in enumerate(walk(teacher, batch).layers)}
    student.head = nn.Identity()
    copied = walk(student.eval(), batch, replace=maps).logits.detach()
    torch.testing.assert_close(read, copied, rtol=1e-4, atol=1e-5)


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


def test_a_near_neighbour_outvotes_two_far_ones():
    # cosines 1, 0.9, 0.9: exp(0.1 / 0.07) is more than 4, so that one vote is more than two; with equal votes
    # it would not be
    test = torch.tensor([[5.0, 0.0]]), torch.tensor([0])
    train = torch.tensor([[1.0, 0.0], [0.9, math.sqrt(0.19)], [0.9, -math.sqrt(0.19)]])
    assert knn_accuracy(train, torch.tensor([0, 1, 1]), *test, ks=(3,)) == {3: 1.0}
    # with three against one, at cosine 0.95: 3 exp(-0.05 / 0.07) is 1.47
    train = torch.tensor([[1.0, 0.0], *[[0.95, math.sqrt(1 - 0.95**2)]] * 3])
    assert knn_accuracy(train, torch.tensor([0, 1, 1, 1]), *test, ks=(1, 4)) == {1: 1.0, 4: 0.0}


def test_an_image_among_the_training_images_is_its_own_neighbour():
    x, y = clusters(30, 0)
    assert knn_accuracy(x, y, 3 * x, y, ks=(1,)) == {1: 1.0}


def softmax_regression(x, y, classes, steps=40, ridge=1e-3):
    """The optimum of mean cross-entropy + ridge/2 · |W|² by Newton's method, in NumPy: weights (D + 1,
    classes)."""
    x, target = np.c_[x, np.ones(len(x))], np.eye(classes)[y]
    W = np.zeros((x.shape[1], classes))
    for _ in range(steps):
        p = np.exp(x @ W - (x @ W).max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        gradient = x.T @ (p - target) / len(x) + ridge * W
        curvature = np.einsum("ni,nj,nc,cd->icjd", x, x, p, np.eye(classes)) - np.einsum(
            "ni,nj,nc,nd->icjd", x, x, p, p
        )
        curvature = curvature.reshape(W.size, W.size) / len(x) + ridge * np.eye(W.size)
        W -= np.linalg.solve(curvature, gradient.ravel()).reshape(W.shape)
    return W


def test_a_linear_probe_reaches_the_optimum():
    train, validation, test = clusters(400, 0), clusters(200, 1), clusters(400, 2)
    probe = linear_probe(*train, *validation, *test, lrs=(0.1,), steps=1500, batch_size=400)
    mean, deviation = train[0].mean(0), train[0].std(0)
    W = softmax_regression(((train[0] - mean) / deviation).double().numpy(), train[1].numpy(), 4, ridge=1e-6)
    logits = np.c_[((test[0] - mean) / deviation).double().numpy(), np.ones(400)] @ W
    best = (logits.argmax(1) == test[1].numpy()).mean()
    assert 0.7 < best < 0.99, "the task must be neither trivial nor hopeless"
    assert probe.test_accuracy == pytest.approx(best, abs=0.01)


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
    # a validation set that only the worst features please decides all the same
    flipped = (validation[0], (validation[1] + 1) % 4)
    chosen = linear_probe(*train, *flipped, *test, lrs=lrs, **settings)
    assert chosen.validation_accuracies[chosen.lr] == max(chosen.validation_accuracies.values()) < 0.5


def test_a_diverged_rate_is_right_about_nothing():
    train, (x, y), test = clusters(100, 0), clusters(60, 1), clusters(60, 2)
    # NaN in all logits makes argmax say class 0, so that is all the validation set shows
    probe = linear_probe(*train, x[y == 0], y[y == 0], *test, lrs=(1e38, 0.1), steps=50)
    assert probe.validation_accuracies[1e38] == 0 and probe.lr == 0.1


def test_of_equal_rates_the_smaller_is_taken():
    train, validation, test = (clusters(60, seed, spread=0.01) for seed in range(3))
    probe = linear_probe(*train, *validation, *test, lrs=(0.3, 0.1, 0.2), steps=50)
    assert set(probe.validation_accuracies.values()) == {1.0} and probe.lr == 0.1 and probe.test_accuracy == 1


def test_a_probe_repeats_and_leaves_the_global_generator_alone():
    train, validation, test = clusters(100, 0), clusters(60, 1), clusters(60, 2)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = linear_probe(*train, *validation, *test, steps=20, batch_size=16)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    assert linear_probe(*train, *validation, *test, steps=20, batch_size=16) == first


@pytest.mark.parametrize(
    "probe",
    [
        lambda train, test: knn_accuracy(*train, *test, ks=(1,)),
        lambda train, test: linear_probe(*train, *test, *test, steps=1),
    ],
)
def test_bad_sets_are_refused(probe):
    (x, y), (test_x, test_y) = clusters(20, 0), clusters(8, 1)
    for train, test, named in (
        ((x, torch.full_like(y, 3)), (test_x, torch.full_like(test_y, 3)), "label 3: "),
        ((x, y), (test_x, test_y + 4), r"_y .*\[4, 5, 6, 7\]"),
        ((x.masked_fill(torch.eye(20, 6).bool(), math.nan), y), (test_x, test_y), "train_x .*nan"),
        ((x, y), (test_x[:, :5], test_y), "_x .*5 .*train_x 6"),
        ((x, y[:-1]), (test_x, test_y), r"train_y .*\(20,\)"),
        ((x, y.float()), (test_x, test_y), "train_y .*torch.float32"),
        ((x, y - 1), (test_x, test_y), "train_y holds -1"),
        ((x[:0], y[:0]), (test_x, test_y), r"train_x is \(0, 6\)"),
    ):
        with pytest.raises(ValueError, match=named):
            probe(train, test)


def test_bad_settings_are_refused(small_vit, images):
    train, test = clusters(20, 0), clusters(8, 1)
    for ks in ((1, 21), (0,), ()):
        with pytest.raises(ValueError, match=re.escape(f"ks={list(ks)}")):
            knn_accuracy(*train, *test, ks=ks)
    for bad in (dict(lrs=()), dict(lrs=(0.1, 0.0)), dict(steps=0), dict(batch_size=0)):
        (name, value), *_ = bad.items()
        named = f"{name}={list(value) if name == 'lrs' else value}"
        with pytest.raises(ValueError, match=re.escape(named)):
            linear_probe(*train, *test, *test, **bad)
    for layer in (3, -1):
        with pytest.raises(ValueError, match=f"layer {layer} "):
            features(small_vit(), images, layer=layer)


def test_an_adaptive_probe_is_lars_by_hand():
    """Full batches, so that every step is known: the weights' step has their own norm, the bias' has not."""
    x, y = clusters(60, 0)
    sets = (x, y, x, y, x, y)
    settings = {"lrs": (5.0,), "steps": 30, "batch_size": 60, "adaptive": True}
    found = linear_probe(*sets, **settings)
    standardised = (x - x.mean(0)) / x.std(0)
    classes = int(y.max()) + 1
    W = 0.01 * torch.randn(classes, x.shape[1], generator=torch.Generator().manual_seed(0))
    b, momentum = torch.zeros(classes), [torch.zeros_like(W), torch.zeros(classes)]
    for step in range(30):
        p = (standardised @ W.T + b).softmax(1) - torch.nn.functional.one_hot(y, classes)
        steps = [p.T @ standardised / len(x), p.mean(0)]
        steps[0] = steps[0] * 0.001 * W.norm() / (steps[0].norm() + 1e-8)
        momentum = [0.9 * old + new for old, new in zip(momentum, steps)]
        rate = 5.0 * 0.5 * (1 + math.cos(math.pi * step / 30))
        W, b = W - rate * momentum[0], b - rate * momentum[1]
    expected = ((standardised @ W.T + b).argmax(1) == y).double().mean().item()
    assert found.test_accuracy == pytest.approx(expected) and found == linear_probe(*sets, **settings)
    assert expected > 0.3, "guessing has a quarter"


def test_an_adaptive_probe_reads_what_a_plain_one_does():
    train, validation, test = clusters(400, 0), clusters(200, 1), clusters(400, 2)
    sets = (*train, *validation, *test)
    plain = linear_probe(*sets, lrs=(0.1,), steps=300)
    adaptive = linear_probe(*sets, lrs=(10.0, 100.0), steps=300, adaptive=True)
    assert adaptive.test_accuracy == pytest.approx(plain.test_accuracy, abs=0.03)
