"""Sphinx extension: matplotlib's figures stand in the page itself, as vectors. Their letters are text in the
page's colour, light or dark. On a phone they have 9 pixels at least: where they would be smaller, the figure
scrolls.

`tools/execute.py` asks notebooks for such figures; on Colab and in Jupyter they are pictures as ever.
"""

import re
from html import escape
from pathlib import Path

from docutils import nodes

# For the kernels that run the book: letters are text, there is no ground, pictures are not smoothed, and the
# same figure has the same ids.
KERNEL = (
    "--InlineBackend.figure_formats=svg",
    *(
        f"--InlineBackend.rc={key}={value}"
        for key, value in {
            "svg.fonttype": "none",
            "svg.hashsalt": "figure",
            "figure.facecolor": "none",
            "axes.facecolor": "none",
            "image.interpolation": "none",
        }.items()
    ),
)
SMALLEST = 9  # pixels
# Black is the page's colour; these have another value on a dark page (book.css).
DARK = "0072b2 333333 444444 1b4f72 3b528b 5e3c99 3f6b12 882255 7a4988 aa3377 8b5a00".split()


def inlined(svg: str, name: str, alt: str) -> str:
    """A figure of matplotlib as part of a page. name: of the figure, which makes its ids the only ones."""
    svg = svg[svg.index("<svg ") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r" transform=\"rotate\(-0 [^\"]*\"| font-family: [^;\"]*;?", "", svg)
    svg = re.sub(r"(?<=>)\s+(?=<)", "", svg).strip()
    used = set(re.findall(r"(?:href=\"|url\()#([\w.-]+)", svg))
    svg = re.sub(r" id=\"([^\"]*)\"", lambda at: f' id="{name}-{at[1]}"' if at[1] in used else "", svg)
    svg = re.sub(r"(href=\"|url\()#", rf"\g<1>#{name}-", svg)
    svg = svg.replace("#000000", "currentColor")
    svg = re.sub(f"#({'|'.join(DARK)})", r"var(--figure-\1, #\1)", svg, flags=re.IGNORECASE)
    width = float(re.search(r"viewBox=\"0 0 ([\d.]+)", svg)[1])
    letters = [float(size) for size in re.findall(r"font(?:-size)?: (?:[\w ]* )?([\d.]+)px", svg)]
    legible = f"--legible: {width * SMALLEST / min(letters):.0f}px" if letters else ""
    opened = f'<svg class="plot" role="img" aria-label="{escape(alt)}" style="{legible}" '
    return re.sub(r" (?:width|height)=\"[\d.]+pt\"", "", svg).replace("<svg ", opened, 1)


def put_figures(app, doctree):
    """Replace the pictures that figures became by the figures."""
    for image in list(doctree.findall(nodes.image)):
        file = Path(app.srcdir, image["uri"].lstrip("/"))
        if "jupyter_execute" in image["uri"] and file.suffix == ".svg":
            svg = inlined(file.read_text(encoding="utf-8"), f"f{file.stem[:8]}", image.get("alt", ""))
            image.replace_self(nodes.raw("", svg, format="html"))


def setup(app):
    app.connect("doctree-read", put_figures)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
