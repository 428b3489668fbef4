"""A class of one's own is walked through an adapter, as examples/own_vit.py writes one."""

import pytest
import torch

from atlib import AttentionTransfer, Plan, create_student, create_vit, walk
from atlib.pair import IMAGENET, Normalisation, attach
from atlib.attention import Unwalkable, check_exact
from examples.own_vit import OwnAdapter, OwnViT, main
from tests.helpers import random_images, randomise, same, state_of

IMAGES = random_images(2, 3, 32, 32)
STUDENT = dict(embed_dim=24, num_heads=3, depth=3, class_token=False, global_pool="avg")


@pytest.fixture
def own():
    return OwnAdapter(randomise(OwnViT()))


def test_the_example_runs(capsys):
    main()
    assert "transfer loss" in capsys.readouterr().out


def test_the_walk_is_the_models_forward(own):
    assert (walk(own, IMAGES).logits - own.model(IMAGES)).abs().max() <= 1e-5
    block, tokens = own.model.layers[0], walk(own, IMAGES, stop_after=0).tokens
    x = block.norm_a(tokens)
    q, k = (f(x).unflatten(-1, (3, 8)).transpose(1, 2) for f in (block.query, block.key))
    expected = (q @ k.mT / 8**0.5).softmax(-1)
    torch.testing.assert_close(walk(own, IMAGES).layers[0].map, expected)


@pytest.mark.parametrize("how", ["copy", "distill"])
def test_it_teaches(own, how):
    student = create_vit("glyphs", **STUDENT)
    pair = AttentionTransfer(own, student, Plan(how=how, mismatched=True))
    assert pair.teacher is own.model or how == "distill"
    logits, loss = pair(IMAGES)
    (logits.square().sum() + loss).backward()
    assert all(weight.grad is None for weight in own.model.parameters())
    assert student.blocks[0].mlp.fc1.weight.grad.abs().max() > 0


def test_two_models_of_the_class(own):
    student = OwnAdapter(OwnViT())
    pair = AttentionTransfer(own, student, Plan(how="distill", mismatched=True))
    assert pair.student is student.model
    pair(IMAGES).transfer_loss.backward()
    assert student.model.layers[2].query.weight.grad.abs().max() > 0


@pytest.mark.parametrize(
    "wrong",
    [{"depth": 2}, {"heads": 6}, {"head_width": 16}, {"prefix_kinds": (1, 0, 0)}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_what_the_adapter_says_of_sizes_is_compared_with_what_is_seen(own, wrong, monkeypatch):
    said = own.sizes()._replace(**wrong)
    monkeypatch.setattr(OwnAdapter, "sizes", lambda self: said)
    with pytest.raises(Unwalkable, match=f"sizes.. says {next(iter(wrong))}"):
        check_exact(own, IMAGES)


def test_without_an_adapter_it_is_refused_with_the_way_out(own):
    with pytest.raises(Unwalkable, match=r"OwnViT: no adapter knows .*examples/own_vit.py"):
        walk(own.model, IMAGES)


def test_a_class_that_names_its_adapter_is_walked_as_it_is(own, monkeypatch):
    monkeypatch.setattr(type(own.model), "walked_by", OwnAdapter, raising=False)
    assert torch.equal(walk(own.model, IMAGES).logits, walk(own, IMAGES).logits)


def test_components_that_nobody_knows_are_asked_for(own):
    with pytest.raises(ValueError, match="components of a OwnViT are not known"):
        create_student(own, 5)
    with pytest.raises(ValueError, match=r"Plan\(mismatched=True\)"):
        AttentionTransfer(own, create_vit("glyphs", **STUDENT), Plan())


def test_a_wrong_adapter_is_found(own):
    class Wrong(OwnAdapter):
        def head(self, tokens):
            return self.model.classify(tokens.mean(1))  # without the norm

    class Pools(OwnAdapter):
        def head(self, tokens):
            return tokens

    class Named(OwnAdapter):
        def output(self, images):
            return {"logits": self.model(images)}

    with pytest.raises(Unwalkable, match="Wrong the walk differs"):
        check_exact(Wrong(own.model))
    with pytest.raises(Unwalkable, match=r"Named.output returns a dict, and a tensor \(B, classes\)"):
        check_exact(Named(own.model))
    with pytest.raises(Unwalkable, match=r"Pools.head makes \(1, 16, 24\)"):
        check_exact(Pools(own.model))
    with pytest.raises(Unwalkable, match="Wrong the walk differs"):
        AttentionTransfer(Wrong(own.model), create_vit("glyphs", **STUDENT), Plan(mismatched=True))


def test_a_wrong_adapter_is_found_behind_a_head_that_starts_at_zero(own):
    class Wrong(OwnAdapter):
        def embed(self, images):
            tokens, layers = super().embed(images)
            return 3 * tokens + 1, layers

    torch.nn.init.zeros_(own.model.classify.weight)
    before = state_of(own.model)
    with pytest.raises(Unwalkable, match="Wrong the walk differs"):
        check_exact(Wrong(own.model))
    assert same(own.model.state_dict(), before)
    assert check_exact(own) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_may_round(own, dtype):
    own.model.to(dtype)
    assert check_exact(own) <= 8 * torch.finfo(dtype).eps

    class Wrong(OwnAdapter):
        def head(self, tokens):
            return self.model.classify(tokens.mean(1))

    with pytest.raises(Unwalkable, match=str(dtype).removeprefix("torch.")):
        check_exact(Wrong(own.model))


def test_the_check_leaves_the_mode_of_every_part_and_the_generator(own):
    own.model.train()
    own.model.layers[0].eval()
    modes = [part.training for part in own.model.modules()]
    state = torch.get_rng_state()
    check_exact(own)
    assert [part.training for part in own.model.modules()] == modes and set(modes) == {True, False}
    assert torch.equal(torch.get_rng_state(), state)


def test_an_adapter_says_how_images_are_normalised_as_its_model_does(own):
    """Said of the adapter, it was not heard of: the teacher saw images of other values."""
    mean_and_std = Normalisation((0.3, 0.4, 0.5), (0.2, 0.25, 0.3))
    attach(own, mean_and_std)
    assert Normalisation.of(own) == Normalisation.of(own.model) == mean_and_std
    pair = AttentionTransfer(own, OwnAdapter(OwnViT()), Plan(mismatched=True), normalisation=IMAGENET)
    assert pair.teacher_normalisation == mean_and_std
    attach(own, None)
    assert Normalisation.of(own.model) is None
