"""The Transformer against torch's own; what it must not see; and maps that are put back."""

import math

import pytest
import torch
from torch import nn

from atfamily.seq2seq import (
    PAD,
    Attention,
    EncoderDecoder,
    Maps,
    StaticMixing,
    sine_positions,
    walk_sequences,
)
from atlib.attention import FORBIDDEN
from tests.helpers import random_images, randomise

WIDTH, HEADS, HIDDEN = 24, 3, 40
SOURCE = torch.tensor([[5, 3, 7, 2, 0, 0], [4, 4, 6, 8, 3, 2], [8, 2, 0, 0, 0, 0]])
TARGET = torch.tensor([[1, 5, 6, 4, 3], [1, 3, 0, 0, 0], [1, 9, 9, 4, 0]])
TOLERANCE = dict(rtol=0, atol=1e-12)


def small(seed=0, **options):
    sizes = dict(width=WIDTH, depth=2, heads=HEADS, hidden=HIDDEN, longest=8, dropout=0.0)
    return randomise(EncoderDecoder(9, 10, **sizes | options), seed).double()


def masks(source=SOURCE, target=TARGET):
    """Of both as the walk has them."""
    no_padding = torch.where(source == PAD, FORBIDDEN, 0.0)[:, None, None].double()
    ahead = torch.ones(target.shape[1], target.shape[1]).triu(1).bool()
    not_ahead = torch.where(ahead | (target == PAD)[:, None], FORBIDDEN, 0.0)[:, None].double()
    return no_padding, not_ahead


# torch's names of the parts of layers: ours
OF_LAYERS = {
    "self_attn": "attention", "multihead_attn": "cross", "linear1": "mlp.0", "linear2": "mlp.2",
    "norm1": "norm1", "norm2": "norm2", "norm3": "norm3",
}  # fmt: skip


def load(ours, theirs):
    """Give a layer of torch's the weights of ours."""
    for name, part in theirs.named_children():
        if not isinstance(part, nn.Dropout):
            mine = ours.get_submodule(OF_LAYERS[name])
            for theirs_, mine_ in pairs(part, mine):
                with torch.no_grad():
                    theirs_.copy_(mine_)


def pairs(part, mine):
    """Parameters of a part of torch's and of ours."""
    if isinstance(mine, Attention):
        projections = (mine.q, mine.k, mine.v)
        yield part.in_proj_weight, torch.cat([linear.weight for linear in projections])
        yield part.in_proj_bias, torch.cat([linear.bias for linear in projections])
        part, mine = part.out_proj, mine.proj
    yield part.weight, mine.weight
    yield part.bias, mine.bias


# --- Against torch's own


def test_the_whole_is_torchs():
    """`nn.Transformer` between our embeddings and head, without its norms after either stack."""
    ours = small()
    kinds = nn.TransformerEncoderLayer, nn.TransformerDecoderLayer
    layers = [kind(WIDTH, HEADS, HIDDEN, dropout=0, batch_first=True, norm_first=False) for kind in kinds]
    encoder = nn.TransformerEncoder(layers[0], 2, enable_nested_tensor=False)
    stacks = {"custom_encoder": encoder, "custom_decoder": nn.TransformerDecoder(layers[1], 2)}
    theirs = nn.Transformer(WIDTH, HEADS, batch_first=True, **stacks).double()
    for mine, layers in ((ours.encoder, theirs.encoder.layers), (ours.decoder, theirs.decoder.layers)):
        for one, other in zip(mine, layers, strict=True):
            load(one, other)
    found = ours(SOURCE, TARGET)
    x, y = ours.embed(SOURCE, ours.embed_in), ours.embed(TARGET, ours.embed_out)
    ahead = torch.ones(5, 5).triu(1).bool()
    padding = dict(zip(("src_key_padding_mask", "tgt_key_padding_mask"), (SOURCE == PAD, TARGET == PAD)))
    out = theirs(x, y, tgt_mask=ahead, memory_key_padding_mask=SOURCE == PAD, **padding)
    expected = nn.functional.linear(out, ours.head.weight, ours.head.bias)
    torch.testing.assert_close(found, expected, **TOLERANCE)


def test_sine_positions_by_the_formula():
    found = sine_positions(7, 6)
    for place in range(7):
        for i in range(3):
            angle = place / 10_000 ** (2 * i / 6)
            assert found[place, 2 * i].item() == pytest.approx(math.sin(angle), abs=1e-7)
            assert found[place, 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-7)


# --- What must not be seen


@pytest.mark.parametrize("static", [False, True])
def test_padding_changes_nothing(static):
    """Nor does how much of it there is; and rows that are words have no weight on it."""
    model = small(static=static)
    together = walk_sequences(model, SOURCE, TARGET)
    for row in range(3):
        source, target = (words[row][words[row] != PAD][None] for words in (SOURCE, TARGET))
        alone = model(source, target)[0]
        torch.testing.assert_close(together.logits[row, : alone.shape[0]], alone, **TOLERANCE)
        assert (together.cross[1].map[row, :, :, source.shape[1] :] == 0).all()
    more = nn.functional.pad(SOURCE, (0, 2))
    torch.testing.assert_close(model(more, TARGET), together.logits, **TOLERANCE)


# --- Maps: seen, put back, put in


@pytest.mark.parametrize("static", [False, True])
def test_own_maps_put_back_change_nothing(static):
    model = small(static=static)
    own = walk_sequences(model, SOURCE, TARGET)
    maps = Maps(*(dict(enumerate(x.map for x in layers)) for layers in (own.encoder, own.decoder, own.cross)))
    again = walk_sequences(model, SOURCE, TARGET, replace=maps)
    torch.testing.assert_close(again.logits, own.logits, **TOLERANCE)
    assert own.encoder[0].map.shape == (3, 1 if static else HEADS, 6, 6)
    if not static:
        for layers in (own.encoder, own.decoder, own.cross):
            for layer in layers:
                torch.testing.assert_close(layer.map.sum(-1), torch.ones(layer.map.shape[:3]).double())


def test_a_copied_map_cannot_show_what_is_forbidden():
    model = small()
    even = torch.full((3, 1, 5, 5), 0.2).double()
    seen = walk_sequences(model, SOURCE, TARGET, replace=Maps(decoder={0: even}))
    expected = torch.ones(5, 5).double().tril() / torch.arange(1, 6)[:, None]
    torch.testing.assert_close(seen.decoder[0].map[0, 0], expected, **TOLERANCE)


def test_a_static_decoder_is_triangular_and_learns_that_alone():
    mixing = StaticMixing(8).double()
    x = random_images(3, 5, WIDTH, dtype=torch.float64)
    mixed, seen = mixing(x, x, masks()[1])
    for row in range(3):
        for i in range(5):
            words = [j for j in range(i + 1) if TARGET[row, j] != PAD]
            expected = sum(mixing.shares[i, j] * x[row, j] for j in words)
            torch.testing.assert_close(mixed[row, i], expected, **TOLERANCE)
    mixed.sum().backward()
    assert (mixing.shares.grad.triu(1) == 0).all() and (mixing.shares.grad[5:] == 0).all()
    assert mixing.shares.grad.tril().abs().sum() > 0 and seen.map.shape == (3, 1, 5, 5)
