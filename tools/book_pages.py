"""Corrections to the built pages, and the explorer's files: a Sphinx extension (named in _config.yml)."""

import posixpath
import re
import shutil
from html import escape
from itertools import zip_longest
from pathlib import Path

from docutils import nodes
from sphinx.addnodes import desc_signature
from sphinx.pycode import ModuleAnalyzer

ROOT = Path(__file__).resolve().parent.parent
EXPLORER = ROOT / "atbook" / "explorer"

# Pages that have moved: {old address: new one}. A link to the old one leads to the new one.
MOVED = {
    "notebooks/02-routing-world": "notebooks/02-a-world-and-a-teacher",
    "notebooks/04-two-ends": "notebooks/03-copy",
    "notebooks/05-attention-copy": "notebooks/03-copy",
    "notebooks/08-which-layers-which-heads": "notebooks/layers-heads-unequal-pairs",
    "notebooks/09-what-in-a-map-matters": "notebooks/layers-heads-unequal-pairs",
    "notebooks/10-is-it-just-distillation": "notebooks/08-is-it-just-distillation",
    "notebooks/11-different-teacher-different-student": "notebooks/layers-heads-unequal-pairs",
    "notebooks/12-never-store-a-map": "notebooks/never-store-a-map",
    "notebooks/13-same-features": "notebooks/same-features-same-mistakes",
    "notebooks/14-same-mistakes": "notebooks/same-features-same-mistakes",
    "notebooks/15-reading-maps": "notebooks/which-rows",
    "notebooks/16-out-of-distribution": "notebooks/09-when-the-images-change",
    "notebooks/17-when-are-features-needed": "notebooks/when-are-features-needed",
    "notebooks/18-when-it-fails": "notebooks/10-when-it-fails-when-to-use-it",
    "notebooks/19-model-size": "book/model-size",
    "notebooks/17-which-layers-which-heads": "notebooks/layers-heads-unequal-pairs",
    "notebooks/18-what-in-a-map-matters": "notebooks/layers-heads-unequal-pairs",
    "notebooks/19-different-teacher-different-student": "notebooks/layers-heads-unequal-pairs",
    "notebooks/20-laptop-to-cluster": "notebooks/laptop-to-cluster",
    "notebooks/14-layers-heads-unequal-pairs": "notebooks/layers-heads-unequal-pairs",
    "notebooks/15-never-store-a-map": "notebooks/never-store-a-map",
    "notebooks/16-laptop-to-cluster": "notebooks/laptop-to-cluster",
    "notebooks/21-where-things-are": "notebooks/where-things-are",
    "notebooks/22-a-real-teacher": "notebooks/05-photographs",
    "notebooks/17-before-there-are-labels": "book/family",
    "notebooks/18-a-second-teachers-token": "book/family",
    "notebooks/19-deep-and-a-class-that-only-asks": "book/family",
    "notebooks/20-where-tokens-come-from": "book/family",
    "notebooks/11-reading-maps": "notebooks/which-rows",
    "notebooks/01-attention": "notebooks/01-what-a-map-does",
    "notebooks/02-two-worlds": "notebooks/02-a-world-and-a-teacher",
    "notebooks/03-making-a-teacher": "notebooks/02-a-world-and-a-teacher",
    "notebooks/04-copy": "notebooks/03-copy",
    "notebooks/05-what-did-the-maps-bring": "notebooks/04-routing-or-message",
    "notebooks/09-when-are-features-needed": "notebooks/when-are-features-needed",
    "notebooks/10-same-features-same-mistakes": "notebooks/same-features-same-mistakes",
    "notebooks/11-which-rows": "notebooks/which-rows",
    "notebooks/12-out-of-distribution": "notebooks/09-when-the-images-change",
    "notebooks/13-when-it-fails": "notebooks/10-when-it-fails-when-to-use-it",
    "notebooks/14-a-real-teacher": "notebooks/05-photographs",
    "notebooks/15-where-things-are": "notebooks/where-things-are",
    "notebooks/16-should-you-use-it": "notebooks/10-when-it-fails-when-to-use-it",
    "book/paper": "book/repeat-imagenet",
    "book/repeat-others": "book/repeat-imagenet",
}

# A line of a tqdm bar: its name, and how far it came ("100%" when it was done).
BAR = re.compile(r"^(?P<name>.*?)\s*(?P<done>\d+%\||\d+it \[)")


def last_of_each_bar(text: str) -> str:
    """`text` without the lines of a progress bar that the bar itself has written over since."""
    lines, kept = text.split("\n"), []
    for line, following in zip_longest(lines, lines[1:], fillvalue=""):
        now, then = BAR.match(line), BAR.match(following)
        if now and then and now["name"] == then["name"] and now["done"] != "100%|":
            continue
        kept.append(line)
    return "\n".join(kept)


def shorten_bars(app, doctree):
    """Keep the last state of progress bars: a bar overwrites its line many times a second, and MyST-NB puts
    every state on a line of its own."""
    for block in doctree.findall(nodes.literal_block):
        if "stderr" in block["classes"] or "stdout" in block["classes"]:
            text = last_of_each_bar(block.astext())
            if text != block.astext():
                block.children = []
                block += nodes.Text(text)
                block.rawsource = text  # the highlighter colours a block only when both are the same


# A number and its unit, in a sentence.
UNIT = re.compile(r"(?<=\d) (?=%)")


def keep_units(app, doctree):
    """Keep lines from ending between a number and its per cent sign."""
    for text in list(doctree.findall(nodes.Text)):
        if UNIT.search(text) and not isinstance(text.parent, (nodes.literal, nodes.literal_block, nodes.raw)):
            text.parent.replace(text, nodes.Text(UNIT.sub("\N{NO-BREAK SPACE}", text)))


def put_drawings(app, doctree):
    """Put drawings into the page itself, where their letters have the page's colour, light or dark. A
    paragraph in italics below a drawing is its caption."""
    for image in list(doctree.findall(nodes.image)):
        file, paragraph = ROOT / "book" / "assets" / "drawings" / Path(image["uri"]).name, image.parent
        if "/drawings/" not in image["uri"] or not isinstance(paragraph, nodes.paragraph):
            continue
        svg = re.sub(r"<style>.*?</style>", "", file.read_text(encoding="utf-8"), flags=re.S)
        label = f'aria-label="{escape(image["alt"])}"'  # a title would be shown under the mouse
        svg = re.sub(r"<title>.*?</title>", "", svg, flags=re.S).replace("<svg ", f"<svg {label} ", 1)
        figure = nodes.figure("", nodes.raw("", svg, format="html"), classes=["drawing"])
        below = paragraph.next_node(descend=False, siblings=True)
        if isinstance(below, nodes.paragraph) and isinstance(below[0], nodes.emphasis):
            figure += nodes.caption("", "", *below[0].children, *below.children[1:])
            figure["ids"] = [f"drawing-{file.stem}"]  # figures with a caption are numbered
            below.parent.remove(below)
        paragraph.replace_self(figure)


def correct(app, pagename, templatename, context, doctree):
    """Correct a page just before it is written: its launch buttons and scripts."""
    # The theme offers Colab for every page that runs code; Colab opens only an .ipynb, which the notebooks
    # have beside them and a page that merely computes its tables has not.
    source = Path(app.srcdir, pagename)
    if not source.with_suffix(".ipynb").exists():
        buttons = context.get("header_buttons", [])
        context["header_buttons"] = [button for button in buttons if button.get("label") != "launch-buttons"]
    # The state of live widgets is of no use without their kernel, and repeats pictures that the page already
    # has.
    if "script_files" in context:
        context["script_files"] = [
            script
            for script in context["script_files"]
            if "widget-state" not in getattr(script, "attributes", {}).get("type", "")
        ]


def skip_tuple_fields(app, what, name, obj, skip, options):
    """Leave out fields of named tuples that have no comment of their own (`#:`): their docstring is "Alias
    for field number 0"."""
    if not (getattr(obj, "__doc__", None) or "").startswith("Alias for field number"):
        return None
    module, kind = (app.env.temp_data[f"autodoc:{part}"] for part in ("module", "class"))
    return None if (kind, name) in ModuleAnalyzer.for_module(module).find_attr_docs() else True


def name_without_link(app, domain, node):
    """Let signatures name classes that are not on the API page; a link in the text has to lead somewhere."""
    while node is not None and not isinstance(node, desc_signature):
        node = node.parent
    return True if node is not None else None


def lead_on(app, error):
    """Write, at every old address, a page that leads to the new one, also without JavaScript."""
    if error is None and app.builder.format == "html":
        for old, new in MOVED.items():
            address = posixpath.relpath(new, posixpath.dirname(old)) + ".html"
            page = (
                '<!doctype html><html lang="en"><meta charset="utf-8"><title>This page has moved</title>'
                f'<meta http-equiv="refresh" content="0; url={address}">'
                f'<p>This page has moved: <a href="{address}">{address}</a></p></html>\n'
            )
            Path(app.outdir, f"{old}.html").write_text(page, encoding="utf-8")


def load_tour(app, pagename, templatename, context, doctree):
    """Let a page with a step of the explorer's tour, `<div class="tour-here">`, load it; the play page loads
    all of the explorer itself."""
    if 'class="tour-here"' in context.get("body", "") and pagename != "book/play":
        script = context["pathto"]("_static/explorer/embed.js", 1)
        context["body"] += f'<script src="{script}"></script>\n'


def put_explorer(app, error):
    """Write the scripts of "Play with it", with the weights of the committed models, and those of the tour
    alone."""
    if error is None and app.builder.format == "html":
        # imported here, because most users of this module do not need torch
        from atbook.explorer import write_weights

        folder = Path(app.outdir, "_static", "explorer")
        shutil.copytree(
            EXPLORER,
            folder,
            ignore=shutil.ignore_patterns("*.py", "*.c", "widget.js", "__pycache__"),
            dirs_exist_ok=True,
        )
        write_weights(folder / "explorer-weights.js", ROOT / "results")
        write_weights(folder / "tour-weights.js", ROOT / "results", students=("scratch", "copy"))


def setup(app):
    # sphinx_external_toc loads this extension, which numbers sections (here none) when all pages are read,
    # and does not say that pages may be read side by side.
    app.setup_extension("sphinx_multitoc_numbering")
    app.extensions["sphinx_multitoc_numbering"].parallel_read_safe = True
    app.connect("html-page-context", load_tour)
    app.connect("build-finished", put_explorer)
    app.connect("build-finished", lead_on)
    app.connect("warn-missing-reference", name_without_link)
    app.connect("autodoc-skip-member", skip_tuple_fields)
    app.connect("doctree-read", shorten_bars)
    app.connect("doctree-read", keep_units)
    app.connect("doctree-read", put_drawings)
    # 900 comes after the theme, which puts its buttons in.
    app.connect("html-page-context", correct, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
