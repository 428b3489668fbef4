"""Comparisons in sentences: `<!-- claim: copy-beats-scratch find match -->` holds one to its verdict.

The comment, invisible in the book and on Colab, stands in the sentence that speaks of the claim: its id in
`claims.toml`, then the scales that the sentence speaks of. The sentence may assert what *holds* there, and
cites a claim that does not hold with "not": `<!-- claim: not queries-beat-maps find -->`. Of any other
verdict it has the phrase, by `PHRASES`: "in all five seeds", "too small to tell", "cannot be seen with five
seeds". So a sentence is found as soon as new records change a verdict.

A bold lead, a caption, or a bullet of "What we learned" that compares, by its words, has such a comment, or
says why no claim is behind it: `<!-- no claim: REASON -->`, with one of `REASONS`.

`python -m tools.claims_in_sentences` lists what is wrong, and then the claims that no sentence cites.
"""

import re
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from atbook.lab.findings import CLAIMS, verdicts
from atbook.lab.verdicts import DOES_NOT_HOLD, HOLDS, IN_ALL, IN_NONE, NOT_RECORDED, TOO_SMALL, UNSEEN, Judged
from tools.sentences import ROOT, pages

# Why a comparison may lack a claim.
REASONS = {
    "quoted": "what a paper reports",
    "observed": "seen in our runs; the paragraph says in how many seeds",
    "exact": "arithmetic, or true by construction",
    "no comparison": "of methods",
}
NUMBERS = {"three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10}
_SEEDS = rf"(?:(?:of )?(?:the |these |our )?(?P<seeds>\d+|{'|'.join(NUMBERS)}) )?seeds"
# What a sentence says of any other verdict; cited with "not", the first two change places.
PHRASES = {
    IN_ALL: re.compile(rf"\bin (?:all|each|every one) {_SEEDS}|\bin every seed\b"),
    IN_NONE: re.compile(rf"\bin (?:none|no one) {_SEEDS}|\bin no seed\b"),
    TOO_SMALL: re.compile(r"\btoo small to tell\b"),
    UNSEEN: re.compile(rf"\bcannot be seen (?:with|in) {_SEEDS}"),
    NOT_RECORDED: re.compile(r"\bnot (?:yet )?recorded\b"),
}
COMMENT = re.compile(r"<!-- (?P<kind>claim|no claim): (?P<what>[^>]*?) -->")
COMPARING = re.compile(
    r"\b(better|worse|than|beats?|helps?|harms?|gains?|loses?|costs?|brings?|worth|enough|"
    r"ahead|behind|above|below|as (good|well|much|far|little) as|no (good|help|use)|nearer|closer)\b",
    re.I,
)
CAPTION = re.compile(r" *(?:figure: {)?caption: (?P<text>[^|].*)?")
END = re.compile(r"(?<=[.?!])(?:[*)\"]|<!--[^>]*?-->)*\s+(?=[*(\"]*[A-Z0-9])")


class Passage(NamedTuple):
    """A paragraph, a bullet or a caption of a page, with its comments."""

    path: Path
    line: int
    #: Of those where a comparison needs a claim: "lead", "learned" or "caption"; otherwise "text".
    kind: str
    text: str

    @property
    def where(self) -> str:
        path = self.path.relative_to(ROOT) if self.path.is_relative_to(ROOT) else self.path
        return f"{path}:{self.line}"


def passages(path: Path) -> list[Passage]:
    """What a reader reads of a page, apart from tables, headings and code."""
    passages, lines, first, section = [], [], 0, ""
    in_code, caption = False, None

    def end() -> None:
        if lines:
            kind = "caption" if in_code else _kind(lines[0], section)
            passages.append(Passage(path, first, kind, " ".join(lines)))
            lines.clear()

    for number, line in enumerate([*path.read_text(encoding="utf-8").splitlines(), ""], start=1):
        indent = len(line) - len(line.lstrip())
        if caption is not None and indent <= caption:
            end()
            caption = None
        if line.startswith("```"):
            end()
            in_code = not in_code
        elif caption is not None:
            lines.append(line.strip())
        elif in_code:
            if match := CAPTION.match(line):
                first, caption = number, indent
                lines.extend([match["text"]] if match["text"] else [])
        elif not line.strip() or line.startswith(("#", "|")):
            end()
            section = line.lstrip("# ") if line.startswith("#") else section
        else:
            if re.match(r"(- |\d+\. )", line):
                end()
            first = first if lines else number
            lines.append(line.strip())
    return passages


def _kind(line: str, section: str) -> str:
    if re.match(r"(- |\d+\. )?\*\*", line):
        return "lead"
    return "learned" if section == "What we learned" and line.startswith("- ") else "text"


def compares(passage: Passage) -> bool:
    """Whether a lead, a bullet or a caption compares, by its words. Of a question the answer is read; in a
    caption "above", "below" and "behind" are places."""
    text = re.sub(r"<!--.*?-->", "", passage.text)
    bold = re.match(r"(?:- |\d+\. )?\*\*(?P<lead>.+?)\*\*(?P<answer>.*)", text)
    if passage.kind == "lead" and bold is not None:
        text = bold["answer"] if bold["lead"].endswith("?") else bold["lead"]
    if passage.kind == "caption":
        text = re.sub(r"\b(above|below|behind)\b", "", text, flags=re.I)
    return passage.kind != "text" and COMPARING.search(text) is not None


def sentence_at(text: str, place: int) -> str:
    """The sentence around a place in a text; a comment right behind a full stop belongs to what is before."""
    cuts = [0, *(match.end() for match in END.finditer(text)), len(text)]
    begin = max(cut for cut in cuts if cut <= place)
    return text[begin : min(cut for cut in cuts if cut > place)]


def says(sentence: str, negated: bool, answer: Judged) -> bool:
    """Whether a sentence that cites a claim, with "not" where `negated`, says what its verdict is."""
    matches = {verdict: match for verdict, phrase in PHRASES.items() if (match := phrase.search(sentence))}
    if answer.verdict in (HOLDS, DOES_NOT_HOLD):
        undecided = matches.keys() & {TOO_SMALL, UNSEEN, NOT_RECORDED}
        return not undecided and negated == (answer.verdict == DOES_NOT_HOLD)
    turned = {IN_ALL: IN_NONE, IN_NONE: IN_ALL} if negated else {}
    if negated and answer.verdict not in turned:
        return False
    phrase = matches.get(turned.get(answer.verdict, answer.verdict))
    if phrase is None:
        return False
    seeds = phrase.groupdict().get("seeds")
    return seeds is None or NUMBERS.get(seeds, seeds) in (answer.estimate.seeds, str(answer.estimate.seeds))


def problems(path: Path, judged: Mapping[tuple[str, str], Judged]) -> list[str]:
    """What is wrong with the comparisons of a page. judged: {(id, scale): its answer}."""
    return [problem for passage in passages(path) for problem in problems_of(passage, judged)]


def problems_of(passage: Passage, judged: Mapping[tuple[str, str], Judged]) -> list[str]:
    """What is wrong with the comparisons of a passage."""
    comments, text = list(COMMENT.finditer(passage.text)), passage.text
    if text.count("<!-- claim") + text.count("<!-- no claim") != len(comments):
        return [f"{passage.where}: a comment is not of the form '<!-- claim: ID SCALE ... -->'"]
    if not comments and compares(passage):
        return [f"{passage.where}: a {passage.kind} compares and cites no claim: {text[:90]}"]
    lines = []
    for comment in comments:
        if comment["kind"] == "no claim":
            if comment["what"] not in REASONS:
                lines.append(f"{passage.where}: {comment['what']!r} is not among the reasons {list(REASONS)}")
            elif comment["what"] == "observed" and not re.search(r"\b(seeds?|runs?|live)\b", text):
                lines.append(f"{passage.where}: observed, but in how many seeds is not said")
            continue
        negated, claim, *scales = re.fullmatch(r"(not )?(.*)", comment["what"]).groups("")
        claim, *scales = claim.split()
        sentence = " ".join(sentence_at(text, comment.start()).split())
        plain = re.sub(r"\*|<!--.*?-->", "", sentence)
        for scale in scales or [None]:
            answer = judged.get((claim, scale))
            if answer is None:
                lines.append(f"{passage.where}: no claim {claim!r} is asked at {scale!r}")
            elif not says(plain, bool(negated), answer):
                verdict = answer.words if answer.estimate else answer.verdict
                lines.append(f"{passage.where}: {claim}, {scale}: {verdict}; other is said: {sentence}")
    return lines


def cited(path: Path) -> set[str]:
    """The ids of the claims that a page cites."""
    return {
        comment["what"].removeprefix("not ").split()[0]
        for comment in COMMENT.finditer(path.read_text(encoding="utf-8"))
        if comment["kind"] == "claim"
    }


@cache
def recorded_verdicts() -> dict[tuple[str, str], Judged]:
    """{(id, scale): what the book's records say of the claim}."""
    return {(answer.claim.id, answer.scale): answer for answer in verdicts()}


def main() -> int:
    """Print what is wrong, and which claims no sentence cites; 1 where anything is wrong."""
    judged = recorded_verdicts()
    lines = [problem for page in pages() for problem in problems(page, judged)]
    uncited = {claim.id for claim in CLAIMS}.difference(*map(cited, pages()))
    print(*lines, f"{len(lines)} sentences say something else than their verdict", sep="\n")
    print("claims that no sentence cites:", ", ".join(sorted(uncited)) or "none")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
