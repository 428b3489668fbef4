"""Predictions that a reader makes by a click: a Sphinx extension (named in _config.yml).

In a notebook a prediction is plain Markdown, readable on Colab and on GitHub as it stands:

    **Predict.** How many tokens move?

    - **A.** two
    - **B.** five

    <details>
    <summary>What comes out, and why</summary>

    **B.** A token that heard the patch in one layer passes it on in the next.

    </details>

The cells that show the outcome follow, with the tag `answer`. They are open, in the book and in print: a
reader who leafs through sees every result. What is closed is the explanation. In the book,
book/assets/predict.js turns the choices into buttons, of which each opens it; without JavaScript its summary
does.
"""

import re
from typing import NamedTuple

from docutils import nodes
from sphinx.util import logging

FORM = re.compile(
    r"^\*\*Predict\.\*\* (?P<question>.+(?:\n.+)*)\n\n"
    r"(?P<choices>(?:- \*\*[A-D]\.\*\* .+\n(?:  .+\n)*)+)\n"
    r"<details>\n<summary>.+</summary>\n\n"
    r"\*\*(?P<right>[A-D])\.\*\* (?P<answer>(?:(?!</details>).*\n)+)</details>$",
    re.M,
)


class Prediction(NamedTuple):
    """One prediction as its source has it."""

    question: str
    choices: dict[str, str]  # {letter: what one may expect}
    right: str  # the letter of what comes out
    answer: str


def predictions(text: str) -> list[Prediction]:
    """The predictions of a Markdown text that have the form."""
    return [
        Prediction(
            match["question"],
            dict(re.findall(r"^- \*\*(\w)\.\*\* (.+(?:\n  .+)*)", match["choices"], re.M)),
            match["right"],
            match["answer"].strip(),
        )
        for match in FORM.finditer(text)
    ]


PREDICT, LETTER = re.compile(r"Predict\."), re.compile(r"[A-D]\.")


def lead(node: nodes.Node, expected: re.Pattern) -> str | None:
    """The bold text that a paragraph begins with, where it is as expected."""
    # MyST leaves an empty text before the bold one
    children = (
        [child for child in node.children if child.astext()] if isinstance(node, nodes.paragraph) else []
    )
    text = children[0].astext() if children and isinstance(children[0], nodes.strong) else ""
    return text if expected.fullmatch(text) else None


def is_html(node: nodes.Node, text: str) -> bool:
    return isinstance(node, nodes.raw) and text in node.astext()


def put_together(app, doctree) -> None:
    """Put each prediction, its choices and its closed answer into one element."""
    for question in [node for node in doctree.findall(nodes.paragraph) if lead(node, PREDICT)]:
        section, at = question.parent, question.parent.index(question)
        below = section[at + 1 :]
        if not below or not isinstance(below[0], nodes.bullet_list):
            continue  # a prediction without choices
        end = next((i for i, node in enumerate(below) if is_html(node, "</details>")), 0)
        right = lead(below[2], LETTER) if end > 2 and is_html(below[1], "<details>") else None
        if right is None:
            logging.getLogger(__name__).warning(
                "a prediction's choices are followed by <details> with the answer, which begins with the"
                " letter of what comes out, in bold: see tools/predictions.py",
                location=question,
            )
            continue
        below[0]["classes"].append("choices")
        section[at:] = [
            nodes.raw("", f'<div class="predict" data-right="{right}">', format="html"),
            question,
            *below[: end + 1],
            nodes.raw("", "</div>", format="html"),
            *below[end + 1 :],
        ]


def setup(app):
    app.connect("doctree-read", put_together)
    app.add_js_file("predict.js", loading_method="defer")
    return {"parallel_read_safe": True, "parallel_write_safe": True}
