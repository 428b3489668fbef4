"""What the hidden tests of A1 ask; `course/a1/master.md` gives each its points."""

from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from atbook.exercises.answers import numbers
from atbook.exercises.own import own_seed
from atbook.worlds import glyph_images
from atbook.worlds.glyphs import World, generate
from atlib import walk
from atlib.checkpoint import load_vit
from course import hidden
from course.hidden import Asked

# --- Task 1: heads that talk ---


def talk_inputs(asked: Asked, heads: int = 3, task: str = "A1.1") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and the matrix of this edition's variant, for 2 images of 5 tokens."""
    seed = asked.seed(task)
    made = {"a": heads, "b": heads + 1, "c": heads}[asked.variants["q1"]]
    mix = (2, 5, made, heads) if asked.variants["q1"] == "c" else (made, heads)
    shapes = (2, heads, 5, 3), (2, heads, 5, 3), (2, made, 5, 4), mix  # √d is not d / 2
    return tuple(hidden.normal(seed + part, *shape) for part, shape in enumerate(shapes))


def talk_map(q: Tensor, k: Tensor, mix: Tensor, variant: str) -> Tensor:
    """The maps, written the long way."""
    z = (q[:, :, :, None] * k[:, :, None]).sum(-1) / q.shape[-1] ** 0.5
    match variant:
        case "a":
            return (mix[:, :, None, None] * z[:, None]).sum(2).softmax(-1)
        case "b":
            return (mix[:, :, None, None] * z.softmax(-1)[:, None]).sum(2)
        case "c":
            weight = mix.permute(0, 2, 3, 1)[..., None]  # (B, G, H, N, 1)
            return (weight * z.softmax(-1)[:, None]).sum(2)


def returned(talking, inputs: tuple) -> tuple[Tensor, Tensor]:
    """What an answer returns for some inputs: (output, maps)."""
    result = talking(*inputs)
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        raise AssertionError("talking has to return two tensors: the output and the maps")
    return result[0], result[1]


def listening(maps) -> Tensor:
    """Maps that give different tokens different shares; others have nothing to do with attention."""
    if not isinstance(maps, Tensor) or maps.ndim != 4:
        raise AssertionError("maps: expected a tensor (B, H, N, N)")
    if not float((maps.amax(-1) - maps.amin(-1)).min()) > 1e-6:
        raise AssertionError("maps: there is a row that gives every token the same")
    return maps.double()


def talk_maps(talking, asked: Asked) -> None:
    """The maps are those of the variant."""
    inputs = talk_inputs(asked)
    want = talk_map(inputs[0], inputs[1], inputs[3], asked.variants["q1"])
    hidden.same(returned(talking, inputs)[1], want, "maps")


def talk_rows(talking, asked: Asked) -> None:
    """The rows of the maps have the right sums."""
    inputs = talk_inputs(asked, task="A1.1 rows")
    want = talk_map(inputs[0], inputs[1], inputs[3], asked.variants["q1"]).sum(-1)
    hidden.same(listening(returned(talking, inputs)[1]).sum(-1), want, "row sums of the maps")


def talk_layout(talking, asked: Asked) -> None:
    """The output is what the answer's own maps make of v, head after head in a token's channels."""
    inputs = talk_inputs(asked, task="A1.1 layout")
    v = inputs[2]
    output, maps = returned(talking, inputs)
    maps = listening(maps)
    want = torch.cat([maps[:, head] @ v[:, head] for head in range(v.shape[1])], dim=-1)
    hidden.same(output, want, "output")


def talk_one_head(talking, asked: Asked) -> None:
    """One head that is listened to is no special case."""
    inputs = talk_inputs(asked, heads=1, task="A1.1 one head")
    want = talk_map(inputs[0], inputs[1], inputs[3], asked.variants["q1"])
    hidden.same(returned(talking, inputs)[1], want, "maps of one head")


# --- Task 2: the gradient by q ---


def forward(variant: str, q: Tensor, k: Tensor, v: Tensor, *rest) -> Tensor:
    """The attention of this edition's variant."""
    z = q @ k.mT / q.shape[-1] ** 0.5
    match variant:
        case "a":
            return torch.cat([torch.zeros_like(z[..., :1]), z], dim=-1).softmax(-1)[..., 1:] @ v
        case "b":
            return (rest[0] * torch.tanh(z / rest[0])).softmax(-1) @ v
        case "c":
            return torch.einsum("gh,bhij->bgij", rest[0], z).softmax(-1) @ v


def back_inputs(asked: Asked, task: str, queries: int, keys: int) -> tuple:
    """q, k, v, the gradient by the output, and what else the variant takes."""
    seed = asked.seed(task)
    shapes = (2, 3, queries, 3), (2, 3, keys, 3), (2, 3, keys, 5), (2, 3, queries, 5)
    q, k, v, grad = (hidden.normal(seed + part, *shape) for part, shape in enumerate(shapes))
    rest = {"a": (), "b": (1.5,), "c": (hidden.normal(seed + 4, 3, 3),)}[asked.variants["q2"]]
    return q, k, v, grad, *rest


def back(gradient, asked: Asked, inputs: tuple, what: str) -> None:
    """An answer's gradient is autograd's."""
    leaf = inputs[0].clone().requires_grad_()
    output = forward(asked.variants["q2"], leaf, *inputs[1:3], *inputs[4:])
    (want,) = torch.autograd.grad(output, leaf, inputs[3])
    hidden.same(gradient(*inputs), want, what)


def back_values(gradient, asked: Asked) -> None:
    """The values are right in double precision."""
    back(gradient, asked, back_inputs(asked, "A1.2", 5, 5), "gradient by q")


def back_unequal(gradient, asked: Asked) -> None:
    """The values are right where there are fewer queries than keys."""
    back(gradient, asked, back_inputs(asked, "A1.2 unequal", 2, 7), "gradient by q of 2 queries and 7 keys")


def back_extreme(gradient, asked: Asked) -> None:
    """The values are right in rows whose scores are all about 3,000 or all about -3,000, and in rows of small
    ones."""
    q, k, *rest = back_inputs(asked, "A1.2 extreme", 6, 6)
    # The last channel adds q's number to all scores of a row.
    q[..., -1] = 3000 * torch.tensor([1.0, -1.0, 0.0]).repeat(2)
    k[..., -1] = k.shape[-1] ** 0.5
    back(gradient, asked, (q, k, *rest), "gradient by q at scores of several thousand")


# --- Task 3: shares on your images ---

WORLDS = {"a": "find", "b": "match", "c": "match"}


@lru_cache
def shares(student: str, edition: str, letter: str, files: Path) -> list[list[float]]:
    """The shares of a variant on a student's images: (layers, heads)."""
    task = WORLDS[letter]
    drawn = generate("test", 200, seed=own_seed(student, f"{edition}/3"), world=World(task))
    teacher = load_vit(files / f"teacher-{task}.safetensors").eval()
    with torch.no_grad():
        seen = walk(teacher, glyph_images(drawn).take(range(200))[0]).layers
    cell, key = (torch.from_numpy(cells) + 1 for cells in (drawn.cell, drawn.key))
    images = range(200)
    shares_of_layers = []
    for layer in seen:
        p = layer.map.double()
        match letter:
            case "a":
                received = [p[i, :, 1:, cell[i]].sum(-1) - p[i, :, cell[i], cell[i]] for i in images]
                shares_of_layers.append(torch.stack(received).mean(0) / 15)
            case "b":
                shares_of_layers.append(torch.stack([p[i, :, cell[i], key[i]] for i in images]).mean(0))
            case "c":
                rest = [1 - p[i, :, 0, [0, cell[i], key[i]]].sum(-1) for i in images]
                shares_of_layers.append(torch.stack(rest).mean(0))
    return torch.stack(shares_of_layers).tolist()


def solution(student: str, edition: str, variants: dict[str, str], files: Path) -> dict[str, str]:
    """What the model solution types in."""
    rows = shares(student, edition, variants["q3"], files)
    return {"SHARES": str([[round(share, 3) for share in row] for row in rows])}


def shares_of_layer(answer, asked: Asked, layer: int) -> None:
    """A layer's shares are those of the student's own images, to 0.002."""
    want = shares(asked.named(), asked.edition, asked.variants["q3"], asked.files)[layer]
    rows = answer if isinstance(answer, (list, tuple)) else ()
    row = numbers(rows[layer], (4,)) if len(rows) == 4 else None
    if row is None:
        raise AssertionError("SHARES has to be 4 rows, one a layer, of 4 numbers, one a head")
    for head, (g, w) in enumerate(zip(row, want)):
        if not abs(g - w) <= 0.002:
            raise AssertionError(f"SHARES: layer {layer}, head {head} is off by more than 0.002")


def layer_0(answer, asked: Asked) -> None:
    """The shares of layer 0 are those of your images."""
    shares_of_layer(answer, asked, 0)


def layer_1(answer, asked: Asked) -> None:
    """The shares of layer 1 are those of your images."""
    shares_of_layer(answer, asked, 1)


def layer_2(answer, asked: Asked) -> None:
    """The shares of layer 2 are those of your images."""
    shares_of_layer(answer, asked, 2)


def layer_3(answer, asked: Asked) -> None:
    """The shares of layer 3 are those of your images."""
    shares_of_layer(answer, asked, 3)
