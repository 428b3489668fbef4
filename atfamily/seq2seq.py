"""The Transformer as it was first published: an encoder of one sequence, and a causal decoder that reads it
and writes another. Walk it, see every map, and put others in their place.

Source: Vaswani et al. 2017, "Attention Is All You Need" (arXiv 1706.03762), section 3. The static variant:
Touvron et al. 2021 (arXiv 2105.03404), translation by a ResMLP.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from atlib._util import require_known
from atlib.attention import FORBIDDEN, Seen, attend, forbid, plus

# The first words of every vocabulary: no word, what a translation begins with, and what ends it.
PAD, BEGIN, END = 0, 1, 2
POSITIONS = ("sine", "learned")


class Maps(NamedTuple):
    """Maps by layer, rows summing to 1, of the three kinds of attention; a layer that is not named has none.
    With 1 in place of H a map serves all heads."""

    #: Among the words of the source: (B, H, N, N).
    encoder: Mapping[int, Tensor] = {}
    #: Among the words of the target: (B, H, M, M).
    decoder: Mapping[int, Tensor] = {}
    #: From the words of the target to those of the source: (B, H, M, N).
    cross: Mapping[int, Tensor] = {}


class SequenceWalk(NamedTuple):
    """The outcome of a walk: a `Seen` for each layer, whose mask also has what padding forbids, (B, 1,
    queries, keys)."""

    #: Of the next word, after each word of the target: (B, M, words).
    logits: Tensor
    #: Self-attention of the encoder; maps (B, H, N, N).
    encoder: tuple[Seen, ...]
    #: Causal self-attention of the decoder; maps (B, H, M, M).
    decoder: tuple[Seen, ...]
    #: Of the decoder, with the encoder's output as keys and values; maps (B, H, M, N).
    cross: tuple[Seen, ...]


# --- How tokens are mixed: by attention, or by one matrix ---


class Attention(nn.Module):
    """Multi-head attention: queries of one sequence, keys and values of the same one or another (section
    3.2). Maps are written out: sequences are short here, and a map that is put back gives the same bits."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.proj = (nn.Linear(width, width) for _ in range(4))

    def forward(
        self, x: Tensor, memory: Tensor, mask: Tensor, given: Tensor | None = None
    ) -> tuple[Tensor, Seen]:
        """What each of x (B, M, D) gathers from memory (B, N, D), (B, M, D), and what was seen. mask: 0 or
        `FORBIDDEN`, (B, 1, M, N); given: a map in place of q and k, which loses what is forbidden, rows
        renormalised."""

        def heads(projected: Tensor) -> Tensor:
            return projected.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, H, tokens, d)

        v = heads(self.v(memory))
        if given is None:
            seen = Seen(heads(self.q(x)), heads(self.k(memory)), v, v.shape[-1] ** -0.5, mask=mask)
        else:
            seen = Seen(None, None, v, 1.0, given=forbid(given, mask), mask=mask)
        mixed = attend(seen, on_fused=False).transpose(1, 2).flatten(2)  # (B, M, H·d)
        return self.proj(mixed), seen


class StaticMixing(nn.Module):
    """What a ResMLP has in place of self-attention: one learned matrix A says who takes how much from whom,
    the same for all sequences and channels. Where the mask forbids, A counts as 0: in a decoder it is
    triangular.

    Sequences shorter than `longest` use its upper left corner.
    """

    def __init__(self, longest: int):
        super().__init__()
        self.shares = nn.Parameter(torch.empty(longest, longest))
        nn.init.xavier_uniform_(self.shares)

    def forward(
        self, x: Tensor, memory: Tensor, mask: Tensor, given: Tensor | None = None
    ) -> tuple[Tensor, Seen]:
        """As `Attention.forward`; the map is A without what is forbidden, (B, 1, M, M), and memory is x."""
        if given is not None and given.shape[1] != 1:
            raise ValueError(f"map {tuple(given.shape)}: static mixing has one head")
        M = x.shape[1]
        shares = self.shares[:M, :M] if given is None else given
        seen = Seen(None, None, x[:, None], 1.0, given=shares * (mask == 0), mask=mask)
        return attend(seen, on_fused=False)[:, 0], seen


# --- The layers: every branch is added to the stream, and the sum is normalised (post-norm) ---


class Mlp(nn.Sequential):
    """Two linear layers with a ReLU between them, word by word (section 3.3)."""

    def __init__(self, width: int, hidden: int):
        super().__init__(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width))


class EncoderLayer(nn.Module):
    """norm(x + attention), then norm(x + MLP). `attention`: an `Attention` or a `StaticMixing`."""

    def __init__(self, attention: nn.Module, width: int, hidden: int, dropout: float = 0.0):
        super().__init__()
        self.attention, self.mlp = attention, Mlp(width, hidden)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor, given: Tensor | None = None) -> tuple[Tensor, Seen]:
        """Words (B, N, D) after the layer, and what its attention saw."""
        mixed, seen = self.attention(x, x, mask, given)
        x = self.norm1(x + self.drop(mixed))
        return self.norm2(x + self.drop(self.mlp(x))), seen


class DecoderLayer(nn.Module):
    """norm(x + causal attention), norm(x + attention to the encoder's output), then norm(x + MLP)."""

    def __init__(self, attention: nn.Module, cross: Attention, width: int, hidden: int, dropout: float = 0.0):
        super().__init__()
        self.attention, self.cross, self.mlp = attention, cross, Mlp(width, hidden)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))
        self.drop = nn.Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        mask: Tensor,
        cross_mask: Tensor,
        given: Tensor | None = None,
        cross_given: Tensor | None = None,
    ) -> tuple[Tensor, Seen, Seen]:
        """Words (B, M, D) after the layer, and what both of its attentions saw. memory: (B, N, D)."""
        mixed, seen = self.attention(x, x, mask, given)
        x = self.norm1(x + self.drop(mixed))
        read, cross = self.cross(x, memory, cross_mask, cross_given)
        x = self.norm2(x + self.drop(read))
        return self.norm3(x + self.drop(self.mlp(x))), seen, cross


# --- The whole ---


class EncoderDecoder(nn.Module):
    """A Transformer from words of one vocabulary to words of another; by default the base model of the paper.

    words_in, words_out: sizes of the vocabularies, with `PAD`, `BEGIN` and `END`; width: D; depth: layers of
    the encoder, and as many of the decoder; longest: words that a sequence may have. positions: "sine", fixed
    (section 3.5), or "learned". static: both stacks mix their own words by `StaticMixing`, and only the
    decoder reads the encoder by attention.

    Source and target have vocabularies of their own, so the paper's sharing of embeddings and last layer
    (section 3.4) is left out. Dropout is on every branch and on embedded words, as in section 5.4; torch's
    own `nn.Transformer` drops more, and normalises once more after either stack. Weight decay takes learned
    positions too.
    """

    def __init__(
        self,
        words_in: int,
        words_out: int,
        width: int = 512,
        depth: int = 6,
        heads: int = 8,
        hidden: int = 2048,
        longest: int = 512,
        dropout: float = 0.1,
        positions: str = "sine",
        static: bool = False,
    ):
        super().__init__()
        require_known("positions", positions, POSITIONS)
        self.longest, self.heads, self.static = longest, heads, static

        def mixing() -> nn.Module:
            return StaticMixing(longest) if static else Attention(width, heads)

        self.embed_in = nn.Embedding(words_in, width)
        self.embed_out = nn.Embedding(words_out, width)
        self.encoder = nn.ModuleList(EncoderLayer(mixing(), width, hidden, dropout) for _ in range(depth))
        self.decoder = nn.ModuleList(
            DecoderLayer(mixing(), Attention(width, heads), width, hidden, dropout) for _ in range(depth)
        )
        self.head = nn.Linear(width, words_out)
        self.drop = nn.Dropout(dropout)
        for name, weight in self.named_parameters():
            if name.startswith("embed"):  # times √D it has variance 1
                nn.init.normal_(weight, std=width**-0.5)
            elif weight.ndim == 2:
                nn.init.xavier_uniform_(weight)
        if positions == "learned":
            self.positions = nn.Parameter(torch.randn(longest, width) * 0.02)
        else:
            self.register_buffer("positions", sine_positions(longest, width), persistent=False)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Logits (B, M, words) of the word after each of target, int64 (B, M), whose first is `BEGIN`, for
        source, int64 (B, N)."""
        return walk_sequences(self, source, target).logits

    def embed(self, words: Tensor, embedding: nn.Embedding) -> Tensor:
        """Words (B, N) with their positions: (B, N, D)."""
        scale = embedding.embedding_dim**0.5
        return self.drop(scale * embedding(words) + self.positions[: words.shape[1]])


def sine_positions(longest: int, width: int) -> Tensor:
    """What is added to the words of each position: sines and cosines of it, in turns, at wavelengths from 2π
    to 10,000 · 2π; (longest, width). Section 3.5."""
    place = torch.arange(longest, dtype=torch.float64)[:, None]
    angle = place / 10_000 ** (torch.arange(0, width, 2, dtype=torch.float64) / width)
    waves = torch.stack([angle.sin(), angle.cos()], -1).flatten(1)
    return waves[:, :width].to(torch.get_default_dtype())


def walk_sequences(
    model: EncoderDecoder, source: Tensor, target: Tensor, *, replace: Maps = Maps()
) -> SequenceWalk:
    """What `model(source, target)` computes, and what every attention layer saw on the way.

    source: int64 (B, N), target: int64 (B, M), `PAD` where there is no word. replace: maps in place of the
    layers' own. What a layer forbids, padding and in the decoder later words, stays forbidden: a new map
    loses those entries, rows renormalised.
    """
    if len(source) != len(target):  # one would be broadcast
        raise ValueError(f"{len(source)} sources, but {len(target)} targets")
    if (source[:, 0] == PAD).any() or (target[:, 0] == PAD).any():  # its row would be forbidden in whole
        raise ValueError("a sequence begins with padding: put words first")
    for maps, layers in zip(replace, (model.encoder, model.decoder, model.decoder)):
        if beyond := maps.keys() - range(len(layers)):
            raise ValueError(f"maps for layer {min(beyond)}, of {len(layers)} layers")

    x = model.embed(source, model.embed_in)
    no_padding = _padding(source, x)
    encoder, decoder, cross = [], [], []
    for index, layer in enumerate(model.encoder):
        x, seen = layer(x, no_padding, replace.encoder.get(index))
        encoder.append(seen)
    memory, x = x, model.embed(target, model.embed_out)
    not_ahead = plus(x.new_full((target.shape[1],) * 2, FORBIDDEN).triu(1), _padding(target, x))
    for index, layer in enumerate(model.decoder):
        given = replace.decoder.get(index), replace.cross.get(index)
        x, seen, read = layer(x, memory, not_ahead, no_padding, *given)
        decoder.append(seen)
        cross.append(read)
    return SequenceWalk(model.head(x), tuple(encoder), tuple(decoder), tuple(cross))


def _padding(words: Tensor, like: Tensor) -> Tensor:
    """`FORBIDDEN` for keys that are no words: (B, 1, 1, N)."""
    return like.new_zeros(words.shape).masked_fill(words == PAD, FORBIDDEN)[:, None, None]
