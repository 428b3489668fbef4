"""SEED and CompRess: the loss image by image, the queues, and a run that goes on."""

import math

import pytest
import torch
from torch.nn.functional import normalize

from atfamily.contrast import features
from atfamily.similarity import CompRess, SimilarityDistillation, similarity_cross_entropy
from atlib.recipe import Recipe
from atlib.train import train
from atrun.checkpoint_manager import CheckpointManager
from tests.helpers import random_images, same, state_of

IMAGES = random_images(3, 3, 32, 32)
ALONE = {"task_weight": 0.0, "transfer_weight": 1.0, "label_smoothing": 0.0}


def pair(small_vit, queue=5, kind=SimilarityDistillation, **options):
    torch.manual_seed(3)
    teacher = small_vit(1, embed_dim=36, num_classes=0)
    return kind(teacher, small_vit(2, num_classes=8), queue=queue, **options)


def test_the_loss_image_by_image():
    own, theirs, queue = (
        normalize(random_images(n, 6, seed=seed, dtype=torch.float64), dim=1)
        for seed, n in enumerate((3, 3, 5))
    )
    losses = []
    for x, z in zip(own, theirs):
        others = [z, *queue]
        p = [math.exp(float(z @ other) / 0.1) for other in others]
        q = [math.exp(float(x @ other) / 0.2) for other in others]
        losses.append(-sum(a / sum(p) * math.log(b / sum(q)) for a, b in zip(p, q)))
    found = similarity_cross_entropy(own, theirs, queue, 0.2, 0.1)
    assert found.item() == pytest.approx(sum(losses) / 3, rel=1e-12)


def test_features_pass_the_queue_in_order(small_vit):
    model = pair(small_vit).train()
    first = model.queue.clone()
    assert torch.allclose(first.norm(dim=1), torch.ones(5))
    with torch.no_grad():
        theirs = normalize(features(model.teacher, IMAGES), dim=1)
    logits, loss = model(IMAGES)
    own = normalize(model.projector(features(model.student, IMAGES)), dim=1)
    expected = similarity_cross_entropy(own, theirs, first, 0.2, 0.01)
    assert abs(loss - expected) <= 1e-5, "an image is not compared with its own place in the queue"
    assert torch.allclose(model.queue, torch.cat([theirs, first[3:]]), atol=1e-6)
    model(IMAGES.flip(0))
    turned = theirs.flip(0)
    assert torch.allclose(model.queue, torch.stack([turned[2], *theirs[1:], *turned[:2]]), atol=1e-6)
    assert (logits - model.student(IMAGES)).abs().max() <= 1e-5
    kept = model.queue.clone()
    assert model.eval()(IMAGES).transfer_loss == 0 and torch.equal(model.queue, kept)


def test_a_batch_larger_than_the_queue(small_vit):
    model = pair(small_vit, queue=2).train()
    model(IMAGES)
    with torch.no_grad():
        newest = normalize(features(model.teacher, IMAGES), dim=1)[1:]
    assert torch.allclose(model.queue, newest, atol=1e-6)


def test_a_run_that_was_stopped_goes_on_with_the_same_queue(small_vit, glyphs64, tmp_path):
    def run(**options):
        model, recipe = pair(small_vit, queue=40), Recipe(steps=5, batch_size=16, **ALONE)
        history = train(model, glyphs64, recipe, progress=None, **options)
        return state_of(model), history

    whole = run()
    run(keeper=CheckpointManager(tmp_path, every=2), stop_at=3)
    pieces = run(keeper=CheckpointManager(tmp_path, every=2))
    assert same(whole[0], pieces[0]) and whole[1] == pieces[1]
    assert whole[0]["next_place"] == 64 + 16 - 2 * 40


# --- CompRess


def shares(x, queue, temperature):
    weights = [math.exp(float(x @ other) / temperature) for other in queue]
    return [weight / sum(weights) for weight in weights]


def test_each_of_both_is_compared_with_its_own_queue_image_by_image(small_vit):
    model = pair(small_vit, kind=CompRess, temperature=0.3).double().train()
    images = IMAGES.double()
    queues = model.own_queue.clone(), model.teacher_queue.clone()
    assert [tuple(queue.shape) for queue in queues] == [(5, 24), (5, 36)]
    with torch.no_grad():
        own, theirs = (normalize(features(vit, images), dim=1) for vit in (model.student, model.teacher))
    expected = 0.0
    for x, z in zip(own, theirs):
        p, q = shares(z, queues[1], 0.3), shares(x, queues[0], 0.3)
        expected += sum(a * math.log(a / b) for a, b in zip(p, q)) / 3
    logits, loss = model(images)
    assert loss.item() == pytest.approx(expected, rel=1e-9)
    assert torch.allclose(logits, model.student(images))
    for queue, first, newest in zip((model.own_queue, model.teacher_queue), queues, (own, theirs)):
        assert torch.allclose(queue, torch.cat([newest, first[3:]])) and not queue.requires_grad
    assert model.next_place == 3 and model.eval()(images).transfer_loss == 0
