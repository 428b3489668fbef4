"""The generated language: sentences are translated by its rule, and the oracle says where words are from."""

import numpy as np
import torch

from atbook.worlds.phrases import (
    FIRST_MARKER,
    FIRST_WORD,
    MARKERS,
    MOST_SOURCE,
    MOST_TARGET,
    TRANSLATION,
    WORDS,
    generate_phrases,
    oracle,
    phrase_sentences,
)
from atfamily.seq2seq import BEGIN, END, PAD


def read(source, translation):
    """A sentence's translation and the place of each of its words, by the rule as it is told."""
    said, places, at = [], [], 0
    while source[at] != END:
        marker, at = source[at] - FIRST_MARKER, at + 1
        phrase = []
        while source[at] >= FIRST_WORD["source"]:
            phrase.append(at)
            at += 1
        order = {
            "keep": phrase,
            "reverse": phrase[::-1],
            "last first": phrase[-1:] + phrase[:-1],
            "first last": phrase[1:] + phrase[:1],
        }[MARKERS[marker]]
        places += order
        said += [FIRST_WORD["target"] + translation[source[place] - FIRST_WORD["source"]] for place in order]
    return said, [*places, at]


def test_sentences_are_translated_by_the_rule():
    drawn = generate_phrases("test", 200, 1)
    assert sorted(TRANSLATION) == list(range(WORDS))
    told = oracle(torch.from_numpy(drawn.source), MOST_TARGET)
    assert torch.equal(told.sum(-1), torch.ones(200, MOST_TARGET))
    for source, target, about, map in zip(drawn.source.tolist(), drawn.target.tolist(), drawn.about, told):
        said, places = read(source, TRANSLATION)
        assert target == [BEGIN, *said, END] + [PAD] * (MOST_TARGET - len(said) - 1)
        assert about.tolist() == places + [-1] * (MOST_TARGET - len(places))
        assert map.argmax(-1).tolist() == places + places[-1:] * (MOST_TARGET - len(places))
    assert drawn.source.max() < FIRST_WORD["source"] + WORDS and drawn.target.max() < 3 + WORDS
    lengths = (drawn.source >= FIRST_WORD["source"]).sum(1)
    assert 2 * 2 <= lengths.min() and lengths.max() <= 2 * 5 and drawn.source.shape[1] == MOST_SOURCE


def test_another_order_keeps_words_and_lengths():
    drawn = generate_phrases("train", 60, 2)
    other = generate_phrases("train", 60, 2, other_order=True)
    markers = (drawn.source >= FIRST_MARKER) & (drawn.source < FIRST_WORD["source"])
    assert np.array_equal(drawn.source[~markers], other.source[~markers])
    assert 0.1 < (drawn.source[markers] == other.source[markers]).mean() < 0.4
    both = phrase_sentences(drawn, other)
    assert both.sources.shape == (60, 2, MOST_SOURCE)
    assert torch.equal(both.sources[:, 0], phrase_sentences(drawn).sources)
    assert np.array_equal(both.targets, drawn.target)


def test_splits_and_seeds_have_streams_of_their_own():
    first = generate_phrases("test", 40).source
    assert np.array_equal(first[:10], generate_phrases("test", 10).source)
    assert np.array_equal(generate_phrases("test", 1001).source[:40], first)
    for other in (generate_phrases("validation", 40), generate_phrases("test", 40, 1)):
        assert not np.array_equal(other.source, first)
