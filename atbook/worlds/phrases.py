"""Phrases: a generated language whose words change places when it is translated.

A sentence is a few phrases. Each begins with a marker, which is not translated; it says in which order the
phrase's words are read:

- *keep*: as they stand;
- *reverse*: from the last to the first;
- *last first*: the last, then the others;
- *first last*: the others, then the first.

Every word has one translation. So what a word of the translation is about is known: one word of the source.
`oracle` says which, as a map that needs no teacher; it knows the order of words, and nothing of their
meaning.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from atbook.worlds.glyphs import SPLITS
from atfamily.sentences import Sentences
from atfamily.seq2seq import BEGIN, END, PAD
from atlib._util import require_known

MARKERS = ("keep", "reverse", "last first", "first last")
FIRST_MARKER = 3  # after PAD, BEGIN and END
FIRST_WORD = {"source": FIRST_MARKER + len(MARKERS), "target": 3}
CHUNK = 1000  # sentences per random stream: the first n of a split are the same whatever its size
MOST = 6  # phrases, and words of a phrase, that random choices are made for
# Words beside the markers, phrases of a sentence, and the fewest and most words of a phrase.
WORDS, PHRASES, SHORTEST, LONGEST = 32, 2, 2, 5
SOURCE_WORDS, TARGET_WORDS = FIRST_WORD["source"] + WORDS, FIRST_WORD["target"] + WORDS  # with all others
MOST_SOURCE = PHRASES * (1 + LONGEST) + 1  # the longest source in words, with markers and `END`
MOST_TARGET = PHRASES * LONGEST + 1  # the longest target, with `END`, without `BEGIN`
# Of every word, counted from 0, the translation: a permutation.
TRANSLATION = np.random.default_rng([WORDS, 66]).permutation(WORDS)


class Phrases(NamedTuple):
    """n generated sentences, padded to the longest that the language has."""

    #: int64 (n, N), with `END` behind the last word.
    source: np.ndarray
    #: int64 (n, M + 1), from `BEGIN` to `END`.
    target: np.ndarray
    #: The place in the source that each word of the target behind `BEGIN` is about, `END` for `END`; -1 for
    #: padding, int64 (n, M).
    about: np.ndarray


def generate_phrases(split: str, size: int, seed: int = 0, other_order: bool = False) -> Phrases:
    """Draw the first `size` sentences of a split of the language.

    The splits of `atbook.worlds.glyphs.SPLITS` come from separate random streams, as do different seeds.
    other_order: the same sentences with other markers, drawn anew, so that they have the same lengths and
    words in another order. Raises `ValueError` for an unknown split and for a size below 1.
    """
    require_known("split", split, SPLITS)
    if size < 1:
        raise ValueError(f"size must be at least 1, got {size}")
    chunks = []
    for index in range(-(-size // CHUNK)):
        # streams of their own: the worlds of images have three numbers, or another fourth
        rng = np.random.default_rng([seed, SPLITS.index(split), index, 65])
        chunks.append(_written(*_draw(rng, other_order)))
    return Phrases(*(np.concatenate(parts)[:size] for parts in zip(*chunks)))


def phrase_sentences(drawn: Phrases, shown: Phrases | None = None) -> Sentences:
    """Generated sentences as data; with `shown`, what stands in the teacher's place for each of them."""
    sources = torch.from_numpy(drawn.source)
    if shown is not None:
        sources = torch.stack([sources, torch.from_numpy(shown.source)], 1)
    return Sentences(sources, torch.from_numpy(drawn.target))


def _draw(rng: np.random.Generator, other_order: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Every random choice, always in this order and the same number of them: lengths as shares of what is
    possible (n, phrases), words as shares (n, phrases, words), markers (n, phrases)."""
    lengths, words = rng.uniform(size=(CHUNK, MOST)), rng.uniform(size=(CHUNK, MOST, MOST))
    markers, others = rng.integers(len(MARKERS), size=(2, CHUNK, MOST))
    return lengths, words, others if other_order else markers


def _written(lengths: np.ndarray, words: np.ndarray, markers: np.ndarray) -> Phrases:
    n = len(lengths)
    lengths = SHORTEST + np.floor(lengths * (LONGEST - SHORTEST + 1)).astype(int)
    words = np.floor(words * WORDS).astype(int)
    source = np.full((n, MOST_SOURCE), PAD)
    target = np.full((n, MOST_TARGET + 1), PAD)
    about = np.full((n, MOST_TARGET), -1)
    for row in range(n):
        place, read = 0, 0
        for phrase in range(PHRASES):
            length, marker = lengths[row, phrase], markers[row, phrase]
            source[row, place] = FIRST_MARKER + marker
            meant = words[row, phrase, :length]
            source[row, place + 1 : place + 1 + length] = FIRST_WORD["source"] + meant
            order = _read_in_order(MARKERS[marker], length)
            about[row, read : read + length] = place + 1 + order
            target[row, 1 + read : 1 + read + length] = FIRST_WORD["target"] + TRANSLATION[meant[order]]
            place, read = place + 1 + length, read + length
        source[row, place], target[row, 0], target[row, 1 + read], about[row, read] = END, BEGIN, END, place
    return Phrases(source, target, about)


def _read_in_order(marker: str, length: int) -> np.ndarray:
    """The places in a phrase, from 0, in the order in which they are translated."""
    places = np.arange(length)
    match marker:
        case "reverse":
            return places[::-1]
        case "last first":
            return np.roll(places, 1)
        case "first last":
            return np.roll(places, -1)
    return places


def oracle(source: Tensor, rows: int) -> Tensor:
    """The right cross-attention: row m of a map (B, rows, N) has its whole weight on the place in source,
    int64 (B, N), that the m-th word of the translation is about; for `END` and what follows on the source's
    `END`.

    It is computed from markers and lengths alone, so that it says where to read and nothing of what stands
    there.
    """
    B, N = source.shape
    places = torch.arange(N, device=source.device).expand(B, N)
    is_marker = (source >= FIRST_MARKER) & (source < FIRST_WORD["source"])
    is_word = source >= FIRST_WORD["source"]
    end = (source == END).int().argmax(1, keepdim=True)
    begins = torch.where(is_marker, places, -1).cummax(1).values  # of each word's phrase: its marker's place
    # where the next phrase begins, or the sentence ends
    borders = torch.where(is_marker | (places == end), places, N).flip(1).cummin(1).values.flip(1)
    marker = source.gather(1, begins.clamp(min=0)) - FIRST_MARKER
    after = borders.roll(-1, 1)
    length, place = after - begins - 1, places - begins - 1
    orders = [place, length - 1 - place, (place + 1) % length.clamp(min=1), (place - 1) % length.clamp(min=1)]
    order = torch.stack(orders).gather(0, marker.clamp(0, len(MARKERS) - 1)[None])[0]
    before = (is_word.cumsum(1) - is_word.int()).gather(
        1, (begins + 1).clamp(max=N - 1)
    )  # words of earlier phrases
    row = torch.where(is_word, before + order, -1)
    about = (row[:, None] == torch.arange(rows, device=source.device)[:, None]).to(torch.get_default_dtype())
    at_end = (about.sum(-1, keepdim=True) == 0) & (places == end)[:, None]
    return about + at_end
