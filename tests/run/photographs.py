"""The command that trains a small run on photographs."""

SMALL = (
    "model=vit_tiny_patch16_224",
    "model.patch_size=8",
    "model.embed_dim=24",
    "model.depth=2",
    "augmentation.image_size=16",
    "batch_size=8",
    "epochs=2",
    "warmup_epochs=1",
)


def asked(data, out, *changes: str) -> list[str]:
    """`changes` are settings, NAME=VALUE."""
    request = ["train", "--recipe", "mae-scratch-vit-base", "--data", str(data), "--out", str(out)]
    return request + [f"--{each}" for each in (*SMALL, *changes)]
