"""The slides: `make slides` builds them in _build/slides. They work from a folder without a network."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT))

from tools.book_pages import keep_units  # noqa: E402

project = "Attention transfer, by running it: slides"
extensions = ["myst_nb", "sphinx_revealjs", "sphinx.ext.mathjax"]
root_doc = "index"
exclude_patterns = ["README.md"]

myst_enable_extensions = ["dollarmath"]
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 600
nb_render_markdown_format = "myst"
nb_mime_priority_overrides = [
    ("revealjs", "image/png", 1),
    ("revealjs", "text/markdown", 2),
    ("revealjs", "text/plain", 3),
]

revealjs_style_theme = "white"
revealjs_static_path = [str(ROOT / "book" / "assets"), "assets"]
revealjs_css_files = ["slides.css"]
revealjs_js_files = ["slides.js"]
revealjs_script_conf = {"width": 1280, "height": 720, "margin": 0.04, "hash": True, "slideNumber": "c/t"}
revealjs_script_conf |= {"center": False, "transition": "none", "controlsTutorial": False}
# The key S opens the speaker's view, with the notes and a clock.
revealjs_script_plugins = [{"name": "RevealNotes", "src": "revealjs/plugin/notes/notes.js"}]
mathjax_path = "mathjax/tex-mml-chtml.js"
html_show_sourcelink = False


def setup(app):
    app.connect("doctree-read", keep_units)
