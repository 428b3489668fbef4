"""The command that trains a small run on photographs, a small ViT's file, and what a command says."""

from atlib.checkpoint import save_vit
from atlib.vit import Architecture
from atrun import __main__ as command
from tests.helpers import randomise

SMALL = (
    "model=vit_tiny_patch16_224", "model.patch_size=8", "model.embed_dim=24", "model.depth=2",
    "augmentation.image_size=16", "batch_size=8", "epochs=2", "warmup_epochs=1",
)  # fmt: skip


def asked(data, out, *changes: str) -> list[str]:
    """`changes` are settings, NAME=VALUE."""
    request = ["train", "--recipe", "mae-scratch-vit-base", "--data", str(data), "--out", str(out)]
    return request + [f"--{each}" for each in (*SMALL, *changes)]


def vit_file(path, classes=3, seed=0, said=None):
    """A file of a ViT of 16 x 16 pixels; said: what its header says beside."""
    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 1, "num_classes": classes}
    architecture = Architecture("vit_tiny_patch16_224", sizes)
    return save_vit(path, randomise(architecture.build(), seed), architecture, said or {})


def said(capsys, *words):
    """(exit code, what was printed, what was wrong) of a command."""
    capsys.readouterr()
    code = command.main([*map(str, words)])
    return code, *capsys.readouterr()
