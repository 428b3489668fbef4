"""What a page of `look` holds, read longhand: the bytes of its data, not the code that wrote them."""

import base64
import json
import re

import numpy as np
import torch

from atrun.looking import Preparation

AS_IT_IS = Preparation((32, 32), (0.5,) * 3, (0.25,) * 3)


def picture(height=32, width=32, seed=5):
    pixels = torch.randint(256, (3, height, width), generator=torch.Generator().manual_seed(seed))
    return pixels.to(torch.uint8)


def content_of(page: str) -> dict:
    """The data of a block or a page of HTML."""
    (text,) = re.findall(r'<script type="application/json">(.*?)</script>', page, re.DOTALL)
    return json.loads(text)


def rows_of(model: dict) -> dict[tuple[int, object, int], np.ndarray]:
    """{(layer, head or a name of `beside`, token): its row, (N,) of float64} of one model of the data."""
    rows, columns = model["grid"]
    first = len(model["prefix"])
    patches = [first + row * columns + column for row in model["down"] for column in model["across"]]
    queries = [*range(first), *patches]
    keys = [
        (one["layer"], head, query)
        for one in model["layers"]
        for head in [*one["heads"], *model["beside"]]
        for query in queries
    ]
    levels = np.frombuffer(base64.b64decode(model["levels"]), np.uint8).reshape(len(keys), -1)
    largest = np.frombuffer(base64.b64decode(model["largest"]), "<f4").astype(float)
    assert levels.shape[1] == first + rows * columns and len(largest) == len(keys)
    return {key: top * (level / 255.0) ** 2 for key, level, top in zip(keys, levels, largest)}


def bound(share: np.ndarray) -> np.ndarray:
    """How far a stored share may be from a row's own (N,), as `quantise` says."""
    largest = share.max(-1, keepdims=True)
    return (np.sqrt(share * largest) + largest / 1020) / 255 + 1e-7 * largest
