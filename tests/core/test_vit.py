"""ViTs by preset, by timm name and by configuration; and what is said when there is none, or no weights."""

import socket
import time
from pathlib import Path

import pytest
import timm
import torch
from huggingface_hub import constants
from safetensors.torch import save_file

from atlib import create_vit, load_teacher
from atlib.checkpoint import save_vit
from atlib.vit import Architecture, WeightsUnavailable, weights_file, without_weights
from tests.helpers import randomise, same, since_timm_31, state_of

TINY = "vit_tiny_patch16_224"


@pytest.fixture
def weights_folder(tmp_path, monkeypatch, no_network):
    """torch's and the hub's caches, empty, on a machine without a network."""
    monkeypatch.setattr("torch.hub._hub_dir", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "checkpoints"


@pytest.fixture
def connections(weights_folder, monkeypatch):
    """The connections that were tried where each is refused and nobody said offline; nothing may wait."""
    tried = []

    def refuse(self, address):
        tried.append(address)
        raise ConnectionRefusedError("no network in this test")

    def no_sleep(seconds):
        raise AssertionError(f"waited for {seconds} s")

    address = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", 443))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *of, **options: [address])
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(time, "sleep", no_sleep)
    return tried


def test_no_network_is_said_at_once(connections, caplog, capfd, recwarn):
    with pytest.raises(WeightsUnavailable, match=TINY):
        create_vit(TINY, pretrained=True)
    assert len(connections) == 1
    assert (caplog.records, [*capfd.readouterr()], len(recwarn)) == ([], ["", ""], 0)


def test_weights_in_the_hubs_cache_need_no_network(connections):
    donor = randomise(timm.create_model(TINY))
    of_timm = Path(constants.HF_HUB_CACHE) / f"models--timm--{TINY}.augreg_in21k_ft_in1k"
    (of_timm / "snapshots" / "0").mkdir(parents=True)
    (of_timm / "refs").mkdir()
    (of_timm / "refs" / "main").write_text("0")
    save_file(state_of(donor), of_timm / "snapshots" / "0" / "model.safetensors")
    assert same(create_vit(TINY, pretrained=True).state_dict(), donor.state_dict())


@pytest.mark.parametrize("damage", ["cut off", "of another model"])
def test_weights_placed_by_hand_that_do_not_fit(weights_folder, damage):
    weights_folder.mkdir()
    path = weights_file(TINY)
    save_file(state_of(create_vit(TINY, depth=1 if damage == "cut off" else 2)), path)
    content = path.read_bytes()[: -100 if damage == "cut off" else None]
    path.write_bytes(content)
    with pytest.raises(WeightsUnavailable, match=path.name):
        create_vit(TINY, pretrained=True, depth=1)
    assert path.read_bytes() == content


@since_timm_31
def test_weights_placed_by_hand_are_used(weights_folder):
    assert weights_file(TINY) == weights_folder / f"{TINY}.safetensors"
    weights_folder.mkdir()
    donor = randomise(timm.create_model(TINY))
    save_file(state_of(donor), weights_file(TINY))
    assert same(create_vit(TINY, pretrained=True).state_dict(), donor.state_dict())
    # With another head everything but the head comes from the file, as timm does it.
    found = create_vit(TINY, pretrained=True, num_classes=4)
    assert found.head.out_features == 4
    assert torch.equal(found.blocks[5].attn.qkv.weight, donor.blocks[5].attn.qkv.weight)


def test_positions_of_as_many_patches_in_another_grid_are_resampled(tmp_path):
    sizes = {"img_size": (32, 128), "embed_dim": 12, "depth": 1, "num_heads": 2, "num_classes": 0}
    wide = randomise(create_vit(TINY, **sizes))
    file = save_vit(tmp_path / "wide.safetensors", wide, Architecture(TINY, sizes))
    square = load_teacher(file, image_size=64, quiet=True).vit.pos_embed
    patches = wide.pos_embed[:, 1:].reshape(1, 2, 8, 12).permute(0, 3, 1, 2)
    expected = torch.nn.functional.interpolate(patches, (4, 4), mode="bicubic", antialias=True)
    torch.testing.assert_close(square[:, 1:], expected.flatten(2).mT)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "beit_base_patch16_224", "eva02_tiny_patch14_224"])
def test_without_weights_a_model_has_the_same_shapes_and_numbers_elsewhere_are_drawn(name):
    def described(model):
        tensors = [*model.named_parameters(), *model.named_buffers()]
        return {name: (x.shape, x.dtype, x.device, x.requires_grad) for name, x in tensors}

    with torch.device("meta"):
        plain = timm.create_model(name, depth=2)
    with without_weights():
        assert described(timm.create_model(name, depth=2)) == described(plain)
        assert torch.zeros(3, device="cpu").fill_(2).tolist() == [2, 2, 2]
