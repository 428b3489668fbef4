"""A slider over pictures that works in a live notebook and in a static page.

An ipywidgets slider needs a kernel: in a static page its knob moves and the picture stays. So a `Slider`
shows itself in two forms made by the same plotting function, and a front end takes the one that it can run:
pictures drawn in advance with a few lines of JavaScript (the book, GitHub, a saved notebook), or a real
ipywidget (Jupyter, Colab).
"""

import base64
import hashlib
import html
import io
import json
from collections.abc import Callable, Sequence
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

# `Slider.html` fills in the names in double underscores. The script takes nothing from outside, so that it
# runs from a file and without a network; it finds its block by the hash of its pictures, so that many sliders
# share a page.
PAGE = """
<div class="frames-slider" data-frames="__HASH__" style="margin: 1em 0">
  <div style="overflow-x: auto">
    <img src="__BEGINS__" alt="__ALT__" style="max-width: 100%; height: auto; display: block">
  </div>
  <div style="display: flex; flex-wrap: wrap; gap: 0.6em; align-items: center">
    <span>__LABEL__ <output style="font-weight: bold">__VALUE__</output></span>
    <input type="range" min="0" max="__LAST__" value="__START__" step="1" autocomplete="off"
           aria-label="__LABEL__" aria-valuetext="__VALUE__" style="flex: 1 1 12em">
  </div>
  <script type="application/json">__FRAMES__</script>
  <script>
    for (const block of document.querySelectorAll("[data-frames='__HASH__']")) {
      const frames = JSON.parse(block.querySelector("script[type='application/json']").textContent);
      const input = block.querySelector("input");
      input.addEventListener("input", function () {
        const frame = frames[Number(input.value)];
        const picture = block.querySelector("img");
        picture.src = frame.src;
        picture.alt = frame.alt;
        block.querySelector("output").textContent = frame.value;
        input.setAttribute("aria-valuetext", frame.value);
      });
    }
  </script>
</div>
"""


class Slider:
    """Pictures drawn for each of `values`, chosen with a slider; the last expression of a cell shows it.

    draw: value -> matplotlib Figure. values: at least one, each shown as `str(value)`. label: what the value
    is. alt: the text for readers who cannot see the picture, one for all or a function of the value. dpi:
    resolution of the drawn-in-advance frames; every frame is stored in the page. start: the value at which it
    opens, by default the first.

    Raises ValueError when `values` is empty or lacks `start` or `alt` says nothing, TypeError when `draw`
    returns something other than a Figure. Every frame is drawn once, when the slider is made, so a mistake in
    `draw` shows there.
    """

    def __init__(
        self,
        draw: Callable[[Any], Figure],
        values: Sequence[Any],
        label: str,
        alt: str | Callable[[Any], str],
        dpi: int = 72,
        start: Any = None,
    ):
        self.draw, self.values, self.label, self.dpi = draw, list(values), label, dpi
        self.alt = alt if callable(alt) else lambda value: alt
        if not self.values:
            raise ValueError("Slider has no values to choose from: `values` is empty")
        self.start = 0 if start is None else self.values.index(start)
        if not all(self.alt(value).strip() for value in self.values):
            raise ValueError("Slider needs an `alt` text that says what its pictures show; it is empty")
        self.frames = [self.picture(value) for value in self.values]

    def picture(self, value: Any) -> str:
        """The picture for `value` as a PNG data address; its figure is closed, so that no cell shows it
        twice."""
        figure = self.draw(value)
        if not isinstance(figure, Figure):
            raise TypeError(
                f"Slider's draw({value!r}) returned {type(figure).__name__}, not a matplotlib Figure; "
                "end the function with `return figure`"
            )
        buffer = io.BytesIO()
        # No version in the file: the same figure gives the same bytes. No tight bounding box: frames of
        # different sizes would make the page jump.
        figure.savefig(buffer, format="png", dpi=self.dpi, metadata={"Software": None})
        plt.close(figure)
        return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()

    def html(self) -> str:
        """The static form: every frame, a slider and its script in one block of HTML."""
        frames = [
            {"src": source, "alt": self.alt(value), "value": str(value)}
            for source, value in zip(self.frames, self.values)
        ]
        # Escaped, because a "<" of a text could end the script element early.
        stored = json.dumps(frames).replace("<", "\\u003c")
        parts = {
            "__HASH__": hashlib.sha256(stored.encode()).hexdigest()[:12],
            "__BEGINS__": self.frames[self.start],
            "__ALT__": html.escape(frames[self.start]["alt"]),
            "__LABEL__": html.escape(self.label),
            "__VALUE__": html.escape(frames[self.start]["value"]),
            "__START__": str(self.start),
            "__LAST__": str(len(frames) - 1),
            "__FRAMES__": stored,
        }
        page = PAGE
        for name, text in parts.items():
            page = page.replace(name, text)
        return page

    def widget(self):
        """The live form: an ipywidgets slider that draws again, with the same function, at every move."""
        import ipywidgets

        def shown(value: Any) -> str:
            alt = html.escape(self.alt(value))
            return f'<img src="{self.picture(value)}" alt="{alt}" style="max-width: 100%">'

        options = [(str(value), value) for value in self.values]
        slider = ipywidgets.SelectionSlider(
            options=options, index=self.start, description=self.label, continuous_update=False
        )
        slider.style.description_width = "initial"
        picture = ipywidgets.HTML(shown(slider.value))
        slider.observe(lambda change: setattr(picture, "value", shown(change["new"])), names="value")
        return ipywidgets.VBox([slider, picture])

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, Any]:
        """Both forms, or the static one alone without ipywidgets and outside a kernel."""
        bundle = {
            "text/plain": f"Slider over {self.label}: {len(self.values)} pictures",
            "text/html": self.html(),
        }
        if has_kernel():
            view = self.widget()._repr_mimebundle_() or {}
            bundle |= {kind: data for kind, data in view.items() if kind.startswith("application/")}
        return bundle


def has_kernel() -> bool:
    """Whether a Jupyter kernel and ipywidgets are there to move a live widget."""
    try:
        import ipywidgets  # noqa: F401
        from IPython import get_ipython
    except ImportError:
        return False
    return hasattr(get_ipython(), "kernel")
