"""BLEU: how much of a translation's words, pairs, triples and quadruples a reference has."""

import math
from collections import Counter
from collections.abc import Hashable, Sequence

LONGEST = 4  # words of an n-gram


def bleu(translations: Sequence[Sequence[Hashable]], references: Sequence[Sequence[Hashable]]) -> float:
    """BLEU of a corpus, one reference a sentence: from 0 to 1.

    For n from 1 to 4, the share of all n-grams of the translations that their references have, each counted
    no more often than it is there; of the four the geometric mean, times exp(1 - r / t) where all t words of
    the translations are fewer than the references' r. Nothing is smoothed. Source: Papineni et al. 2002,
    "BLEU: a method for automatic evaluation of machine translation", section 2.3.
    """
    right, all_there = [0] * LONGEST, [0] * LONGEST
    for translation, reference in zip(translations, references, strict=True):
        for n in range(1, LONGEST + 1):
            translated, expected = _ngrams(translation, n), _ngrams(reference, n)
            right[n - 1] += (translated & expected).total()
            all_there[n - 1] += translated.total()
    if min(right) == 0:
        return 0.0
    written, wanted = (sum(map(len, sentences)) for sentences in (translations, references))
    shares = sum(math.log(matches / there) for matches, there in zip(right, all_there)) / LONGEST
    return math.exp(min(0.0, 1 - wanted / written) + shares)


def _ngrams(words: Sequence[Hashable], n: int) -> Counter:
    return Counter(tuple(words[start : start + n]) for start in range(len(words) - n + 1))
