"""A sentence of the generated language with its translation: who reads where, and the same as a map."""

import torch

from atbook.drawing.svg import GREY, arrow, box, drawing, heat, text
from atbook.plot import COLOURS
from atbook.worlds.phrases import FIRST_MARKER, FIRST_WORD, MARKERS, oracle
from atfamily.seq2seq import END

# Words are letters, capitals when they are translated; markers are in front of their phrase.
SENTENCE = ("reverse", "a", "b", "c", "last first", "d", "e", "f", "end")
SHORT = {"reverse": "↶", "last first": "↷", "end": "."}
STEP, SIDE = 38, 16  # between words, and of a cell of the map
ALT = (
    "An encoder reads a sentence of two phrases: a, b, c, marked to be reversed, and d, e, f, whose last "
    "word comes first. A decoder writes the translation: C, B, A, F, D, E. Each of its words reads one word "
    "of the source. As a table, that is the right cross-attention map, a row for each word that is written."
)


def translation() -> str:
    """The drawing, an SVG file."""
    p = reads()
    about = p.argmax(-1).tolist()
    written = [SENTENCE[place].upper() if SENTENCE[place] != "end" else "end" for place in about]
    indent = STEP * (len(SENTENCE) - len(written)) / 2
    parts = [text(180, 14, "an encoder reads the source", bold=True)]
    for place, word in enumerate(SENTENCE):
        parts += _word(_x(place), 22, word, "solid" if len(word) == 1 else "dotted")
    for row, place in enumerate(about):
        parts.append(arrow(_x(place), 48, _x(row) + indent, 108, COLOURS["copy"]))
    for row, word in enumerate(written):
        parts += _word(_x(row) + indent, 110, word, "solid" if len(word) == 1 else "dotted")
    parts.append(text(180, 152, "a decoder writes the translation", bold=True))
    left, top = 40, 192
    parts += [text(_cell(left, place), top - 6, _sign(word)) for place, word in enumerate(SENTENCE)]
    parts += [text(left - 10, _cell(top, row) + 4, _sign(word)) for row, word in enumerate(written)]
    parts.append(heat(left, top, SIDE, p.numpy()))
    says = (
        "the cross map p: M × N",
        "",
        "Copied, it stands in place",
        "of the decoder's own. It",
        "says where to read, not",
    )
    parts += [
        text(198, top + 16 + 17 * line, words, "start")
        for line, words in enumerate((*says, "what a word means."))
    ]
    parts.append(text(180, top + SIDE * len(written) + 26, "↶ reverse the phrase, ↷ its last word first"))
    return drawing(top + SIDE * len(written) + 38, ALT, parts)


def reads() -> torch.Tensor:
    """The right map of the sentence: (M, N)."""
    letters = [word for word in SENTENCE if len(word) == 1]
    numbers = {word: FIRST_WORD["source"] + number for number, word in enumerate(letters)}
    numbers |= {marker: FIRST_MARKER + number for number, marker in enumerate(MARKERS)} | {"end": END}
    source = torch.tensor([[numbers[word] for word in SENTENCE]])
    return oracle(source, len(letters) + 1)[0]


def _x(place: int) -> float:
    return 28 + STEP * place


def _cell(start: float, index: int) -> float:
    return start + SIDE * (index + 0.5)


def _sign(word: str) -> str:
    return SHORT.get(word, word)


def _word(x: float, y: float, word: str, line: str) -> list[str]:
    return [box(x - 15, y, 30, 24, GREY, line), text(x, y + 16, _sign(word))]
