"""Stored maps: a pair computes what it computes with its teacher, and nothing else passes for them."""

import pytest
import torch
from torch import nn

from atfamily.map_cache import KEY, MapCache, fingerprint
from atlib import AttentionTransfer, Plan, create_vit
from tests.helpers import forkserver

TINY = dict(img_size=16, patch_size=8, embed_dim=16, depth=3, num_heads=2, num_classes=3)


def vit(seed, **changes):
    torch.manual_seed(seed)
    model = create_vit({**TINY, **changes})
    for parameter in model.parameters():  # maps that are far from even
        nn.init.normal_(parameter, std=0.5)
    return model


@pytest.fixture
def images():
    return torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def teacher():
    return vit(0, embed_dim=24)


def filled(folder, teacher, images, **options):
    cache = MapCache(folder, teacher, **options)
    cache.add(images)
    cache.add(images.flip(-1))
    return cache


PLANS = {
    "copy": Plan(),
    "some layers and heads": Plan(how="distill", layers=[0, 2], heads=[1]),
    "class rows": Plan(rows="class"),
    "average": Plan(average="heads"),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_step_with_stored_maps_is_the_step_with_the_teacher(name, tmp_path, teacher, images):
    cache = filled(tmp_path, teacher, images, dtype="float32")
    outcomes = []
    for maps in (None, cache):
        student = vit(1)
        pair = AttentionTransfer(teacher, student, PLANS[name], maps=maps)
        some = torch.cat([images[:3], images[2:5].flip(-1)])  # mirrors are images of their own
        logits, transfer_loss = pair(some)
        (logits.square().sum() + transfer_loss).backward()
        gradients = torch.cat([p.grad.flatten() for p in student.parameters() if p.grad is not None])
        outcomes.append((logits, transfer_loss, gradients))
    for live, stored in zip(*outcomes):
        assert live.abs().max() > 0 or PLANS[name].how == "copy"
        torch.testing.assert_close(stored, live, rtol=1e-4, atol=1e-5 * live.detach().abs().max().item())


def test_half_precision_keeps_eleven_bits_and_rows_that_sum_to_one(tmp_path, teacher, images):
    stored = filled(tmp_path / "half", teacher, images)(images)
    exact = filled(tmp_path / "single", teacher, images, dtype="float32")(images)
    assert [*stored] == [0, 1, 2]
    for layer in stored:
        torch.testing.assert_close(stored[layer], exact[layer], rtol=2**-10, atol=1e-7)
        torch.testing.assert_close(stored[layer].sum(-1), torch.ones(6, 2, 5), rtol=0, atol=1e-6)


def test_only_what_is_missing_is_made_and_another_reader_sees_it(tmp_path, teacher, images, monkeypatch):
    cache, reader = MapCache(tmp_path, teacher), MapCache(tmp_path, teacher)
    assert (cache.add(images[:4]), cache.add(images), cache.add(images)) == (4, 2, 0)
    assert cache.add(torch.cat([images, images[:1] + 1])) == 1 and len(cache) == 7
    for layer, maps in reader(images).items():
        assert torch.equal(maps, cache(images)[layer])
    order = torch.tensor([3, 0, 3])
    for layer, maps in reader(images[order]).items():
        assert torch.equal(maps, reader(images)[layer][order])


def test_what_a_kill_leaves_behind_is_cut_off(tmp_path, teacher, images):
    filled(tmp_path, teacher, images[:2])
    with open(tmp_path / "maps", "ab") as file:
        file.write(b"half a map")
    with open(tmp_path / "keys", "ab") as file:
        file.write(b"half")
    cache = MapCache(tmp_path, teacher)
    assert len(cache) == 4 and cache.add(images) == 4
    fresh = filled(tmp_path / "fresh", teacher, images)
    for layer, maps in MapCache(tmp_path, teacher)(images).items():
        assert torch.equal(maps, fresh(images)[layer])
    assert (tmp_path / "keys").stat().st_size == 8 * KEY


def _add(folder, images):
    MapCache(folder, vit(0, embed_dim=24)).add(images)


@pytest.mark.slow
def test_two_processes_add_side_by_side(tmp_path, teacher, images):
    parts = images[:4], images[2:]
    processes = [forkserver().Process(target=_add, args=(tmp_path, part)) for part in parts]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    cache = MapCache(tmp_path, teacher)
    assert len(cache) == 6 and cache.add(images) == 0


def test_the_fingerprint_of_a_teacher_stays():
    """Caches and records of other days hold it: this one was written down on 2026-11-24."""
    model = create_vit(TINY)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.fill_(number)
    assert fingerprint(model) == "47d3c5bb03b52dea3ceddc8ca0432240"


def test_another_teachers_maps_are_refused(tmp_path, teacher, images):
    filled(tmp_path, teacher, images)
    other = vit(0, embed_dim=24)
    other.load_state_dict(teacher.state_dict())
    assert len(MapCache(tmp_path, other)) == 12, "the same weights"
    with torch.no_grad():
        other.blocks[1].mlp.fc1.bias[0] += 1e-3
    with pytest.raises(ValueError):
        MapCache(tmp_path, other)
    for options in ({"layers": [0, 1]}, {"dtype": "float32"}):
        with pytest.raises(ValueError):
            MapCache(tmp_path, teacher, **options)


def test_what_maps_alone_do_not_serve_is_refused(tmp_path, teacher, images):
    cache = filled(tmp_path, teacher, images, layers=[0, 1])
    assert [*cache(images)] == [0, 1]
    AttentionTransfer(teacher, vit(1), Plan(layers=range(2)), maps=cache)(images)
    with pytest.raises(KeyError):
        AttentionTransfer(teacher, vit(1), Plan(), maps=cache)(images)
    with pytest.raises(ValueError):
        AttentionTransfer(vit(0), vit(1), Plan("q"), maps=cache)
    with pytest.raises(ValueError):
        AttentionTransfer(teacher, vit(1, drop_path_rate=0.1), Plan(layers=range(2)), maps=cache)


def test_images_of_another_size_are_not_kept(tmp_path, images):
    cache = MapCache(tmp_path, create_vit(TINY | {"dynamic_img_size": True}))
    cache.add(images)
    with pytest.raises(ValueError):
        cache.add(torch.randn(2, 3, 32, 32))
    assert len(cache) == 6 and cache(images)[0].shape[-1] == cache.shape[-1]


def test_maps_of_another_number_of_tokens_are_refused(images):
    """Where only some tokens count, the others' number would go unseen."""
    teacher, student = vit(0, embed_dim=24, reg_tokens=4), vit(1, embed_dim=24)
    plan = Plan(how="distill", unequal_prefix="drop", mismatched=True)

    def loss_of(tokens):
        maps = {layer: torch.full((len(images), 2, tokens, tokens), 0.01) for layer in range(3)}
        return AttentionTransfer(teacher, student, plan, maps=lambda images: maps)(images)[1]

    assert loss_of(9) > 0
    with pytest.raises(ValueError):
        loss_of(12)


def test_a_teacher_that_its_owner_trains_is_asked_in_eval_mode(tmp_path, images):
    teacher = vit(0, proj_drop_rate=0.5)
    cache, other = MapCache(tmp_path / "a", teacher), MapCache(tmp_path / "b", teacher)
    cache.add(images)
    teacher.train()
    other.add(images)
    assert teacher.training
    one, again = cache(images), other(images)
    assert all(torch.equal(one[layer], again[layer]) for layer in cache.layers)
