"""What the notebooks write out by hand (cells tagged `taught`) computes what atlib computes, on other inputs
than theirs."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import jupytext
import pytest
import torch
from timm.layers import Attention

from atbook.worlds import glyph_images, glyphs
from atlib import create_vit
from atlib.recipe import Recipe
from atlib.train import schedule, train
from tests.helpers import ROOT, SMALL_VIT

NOTEBOOKS = ROOT / "notebooks"


def taught_cells(source: Path) -> list[str]:
    """The code of a notebook's cells tagged `taught`, in order."""
    cells = jupytext.read(source, fmt="md:myst").cells
    return [cell.source for cell in cells if "taught" in cell.metadata.get("tags", [])]


@cache
def taught(name: str) -> SimpleNamespace:
    """All that the taught cells of notebooks/NAME.md define, run by themselves in one namespace."""
    cells = taught_cells(NOTEBOOKS / f"{name}.md")
    assert cells, f"{name}.md has no cell tagged `taught`"
    namespace: dict = {}
    for code in cells:
        exec(compile(code, f"{name}.md", "exec"), namespace)
    return SimpleNamespace(**{key: value for key, value in namespace.items() if not key.startswith("__")})


def small_vit(seed: int, **changes):
    """A small ViT with timm's own first weights, in eval mode."""
    torch.manual_seed(seed)
    return create_vit(SMALL_VIT | {"embed_dim": 48} | changes).eval()


@pytest.mark.parametrize("name", [path.stem for path in sorted(NOTEBOOKS.glob("*.md")) if taught_cells(path)])
def test_taught_cells_stand_on_their_own(name):
    assert any(callable(value) for value in vars(taught(name)).values())


# attention-refreshed


@pytest.mark.parametrize("width, heads", [(48, 3), (40, 1), (64, 8)])
def test_multi_head_attention_is_timms(width, heads):
    torch.manual_seed(heads)
    layer = Attention(width, num_heads=heads, qkv_bias=True).eval()
    x = torch.randn(29, width)
    with torch.no_grad():
        output, maps = taught("attention-refreshed").multi_head_attention(
            x, layer.qkv.weight, layer.qkv.bias, layer.proj.weight, layer.proj.bias, heads
        )
        assert torch.allclose(output, layer(x[None])[0], atol=1e-5)
    assert maps.shape == (heads, 29, 29)


# training-loop


@pytest.mark.parametrize(
    "recipe",
    [Recipe(steps=37), Recipe(steps=20, warmup=0.0), Recipe(steps=50, warmup=0.3, lr=3e-3, min_lr=1e-3)],
)
def test_lr_factor_is_the_schedule(recipe):
    factors = [taught("training-loop").lr_factor(step, recipe) for step in range(recipe.steps)]
    assert factors == pytest.approx([schedule(step, recipe) for step in range(recipe.steps)])


@pytest.mark.parametrize(
    "changes", [{}, {"lr": 4e-3, "weight_decay": 0.5, "clip": 0.1}, {"label_smoothing": 0.0, "warmup": 0.0}]
)
def test_train_by_hand_is_train(changes):
    """50 images in batches of 16: the last batch of a pass is short, and nine steps cross two passes."""
    recipe = replace(Recipe(steps=9, batch_size=16), **changes)
    images = glyph_images(glyphs.generate("train", 50, seed=5))
    by_hand, by_atlib = (small_vit(11, depth=2, reg_tokens=1, num_classes=8) for _ in range(2))
    taught("training-loop").train_by_hand(by_hand, images, recipe, seed=7)
    train(by_atlib, images, recipe, seed=7, progress=None, cpu=True)
    for (name, ours), theirs in zip(by_hand.named_parameters(), by_atlib.parameters()):
        assert torch.allclose(ours, theirs, atol=1e-5), name
