"""A slider over pictures, in a live notebook and in a static page. An ipywidgets slider would need a kernel:
here the pictures are drawn in advance, and a few lines of JavaScript choose among them."""

import base64
import hashlib
import html
import io
import json
from collections.abc import Callable, Sequence
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

# `Slider` fills in the names in double underscores. The script takes nothing from outside, so that it
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
        self.frames = [self._picture(value) for value in self.values]

    def _picture(self, value: Any) -> str:
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

    def _repr_html_(self) -> str:
        """Every frame, a slider and its script in one block of HTML."""
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
