"""A frozen teacher's maps of some images, made once and read from a file ever after."""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from atlib._util import in_eval_mode, naming, require_known, write_atomically
from atlib.attention import walk
from atlib.compatibility import sizes_of
from atlib.student import describe

DTYPES = {"float16": np.float16, "float32": np.float32}
KEY = 16  # bytes of an image's key


class MapCache:
    """The maps of `teacher`, kept in `folder`: `add` runs the teacher, and calling the cache reads what is
    there. `AttentionTransfer(teacher, student, plan, maps=cache)` then copies or distills without running the
    teacher at all.

    It pays for many small students on the same few images without random augmentation. An image takes layers
    x heads x N² numbers: 42 kB for a ViT-S with 17 tokens, 30 MB for a ViT-L with 197, that is 38 TB for
    ImageNet.

    Images are known by their content, to the bit, as the teacher would be given them. Rows are rescaled when
    they are read, since half precision keeps 11 bits of a number.

    folder: made where it is missing; several processes may read, and add, at a time. layers: None for all.
    dtype: "float16", or "float32" for maps as the teacher makes them.
    """

    def __init__(
        self,
        folder: str | Path,
        teacher: VisionTransformer | Eva,
        layers: Iterable[int] | None = None,
        dtype: str = "float16",
    ):
        require_known("dtype", dtype, DTYPES)
        self.folder, self.teacher, depth = Path(folder), teacher.eval(), len(teacher.blocks)
        self.layers = tuple(range(depth)) if layers is None else tuple(sorted({*layers}))
        if not self.layers or not 0 <= self.layers[0] <= self.layers[-1] < depth:
            raise ValueError(f"layers={list(self.layers)}: some of the teacher's, 0 to {depth - 1}")
        sizes = sizes_of(teacher)
        tokens = sizes.prefix + sizes.grid[0] * sizes.grid[1]
        self.shape = len(self.layers), sizes.heads, tokens, tokens
        self.dtype = np.dtype(DTYPES[dtype])
        about = {
            "teacher": fingerprint(teacher),
            "layers": [*self.layers],
            "shape": [*self.shape],
            "dtype": dtype,
        }
        path = self.folder / "about.json"
        with self._only_writer():
            if not path.exists():
                write_atomically(path, json.dumps(about, indent=1).encode())
            elif differ := [n for n, value in json.loads(path.read_text()).items() if value != about.get(n)]:
                raise ValueError(f"{self.folder} holds maps of other {', '.join(differ)}")
        self._places: dict[bytes, int] = {}
        self._read_keys()

    def __len__(self) -> int:
        return len(self._places)

    def __call__(self, images: Tensor) -> dict[int, Tensor]:
        """The teacher's maps of images (B, 3, height, width): {layer: (B, H, N, N)}, float32, rows sum to 1,
        where the images are."""
        keys = keys_of(images)
        if any(key not in self._places for key in keys):
            self._read_keys()  # another process may have added them
        missing = [place for place, key in enumerate(keys) if key not in self._places]
        if missing:
            raise ValueError(f"{self.folder} lacks maps of {len(missing)} of {len(keys)} images: add(images)")
        kept = np.memmap(self.folder / "maps", self.dtype, "r", shape=(len(self), *self.shape))
        stored = torch.from_numpy(kept[[self._places[key] for key in keys]])
        maps = stored.to(images.device).float()
        maps /= maps.sum(-1, keepdim=True)
        return dict(zip(self.layers, maps.unbind(1)))

    def add(self, images: Tensor) -> int:
        """Run the teacher on those of the images (B, 3, height, width) that are not there yet and keep their
        maps; returns how many these were."""
        images = images.to(next(self.teacher.parameters()).device)
        if not self._unknown(keys_of(images)):
            return 0
        with self._only_writer():
            self._read_keys()
            unknown = self._unknown(keys_of(images))
            if not unknown:
                return 0
            maps = self._made(images[[*unknown.values()]])
            # The maps first, the keys when they are safe: what a kill leaves behind is cut off by the next.
            for name, content, length in (
                ("maps", maps.tobytes(), int(np.prod(self.shape)) * self.dtype.itemsize),
                ("keys", b"".join(unknown), KEY),
            ):
                path = self.folder / name
                with naming(path), open(path, "ab") as file:
                    file.truncate(len(self) * length)
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
            self._read_keys()
        return len(unknown)

    def _unknown(self, keys: Iterable[bytes]) -> dict[bytes, int]:
        """Those of the keys that are not there, each once, with its place among them."""
        return {key: place for place, key in enumerate(keys) if key not in self._places}

    def _made(self, images: Tensor) -> np.ndarray:
        """The teacher's maps of images: (B, L, H, N, N)."""
        with torch.inference_mode(), in_eval_mode(self.teacher):
            seen = walk(self.teacher, images, stop_after=self.layers[-1]).layers
            maps = torch.stack([seen[layer].map for layer in self.layers], 1).cpu()
        if maps.shape[1:] != self.shape:
            raise ValueError(f"maps {tuple(maps.shape[1:])}, and those in {self.folder} are {self.shape}")
        if not maps.isfinite().all():
            raise ValueError("the teacher's maps of these images are not finite: look for NaN in its weights")
        exact = torch.promote_types(maps.dtype, torch.float32)  # NumPy has no bf16
        return maps.to(exact).numpy().astype(self.dtype)

    def _read_keys(self) -> None:
        """Know what is there by now. A key is written after its maps, whole or not yet."""
        path, count = self.folder / "keys", len(self._places)
        if not path.exists():
            return
        with open(path, "rb") as file:
            file.seek(count * KEY)
            more = file.read()
        for start in range(0, len(more) - KEY + 1, KEY):
            self._places[more[start : start + KEY]] = count + start // KEY

    @contextmanager
    def _only_writer(self) -> Iterator[None]:
        """One process at a time."""
        import fcntl  # here, where it is needed: Windows has none

        self.folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)


def fingerprint(vit: VisionTransformer | Eva) -> str:
    """32 hexadecimal digits that two ViTs share when they compute the same: of their weights, their heads and
    their components."""
    sizes = sizes_of(vit)
    heads = [sizes.heads] * sizes.depth  # of each layer: as caches and records have it from before adapters
    digest = hashlib.blake2b(json.dumps([heads, describe(vit)]).encode(), digest_size=16)
    for name, value in sorted(vit.state_dict().items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(_bytes_of(value))
    return digest.hexdigest()


def keys_of(images: Tensor) -> list[bytes]:
    """What images (B, 3, height, width) are known by, one key each: equal for the same bits alone."""
    if images.ndim != 4:
        raise ValueError(f"images are (B, 3, height, width), got {tuple(images.shape)}")
    start = f"{images.dtype} {tuple(images.shape[1:])}".encode()
    return [
        hashlib.blake2b(start + _bytes_of(image).tobytes(), digest_size=KEY).digest()
        for image in images.cpu()
    ]


def _bytes_of(x: Tensor) -> np.ndarray:
    return x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
