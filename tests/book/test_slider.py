"""A slider shows itself twice: frames drawn in advance, and a live widget from the same function."""

import base64
import json
import re

import pytest
from matplotlib import pyplot as plt

from atbook.slider import Slider


def parabola(power):
    figure, axes = plt.subplots(figsize=(2, 1))
    axes.plot([0, 0.5, 1], [0, 0.5**power, 1])
    return figure


def make(**changed):
    options = {"draw": parabola, "values": [1, 2, 3], "label": "power"} | changed
    return Slider(alt=lambda power: f"x to the {power}", **options)


def frames(slider):
    return json.loads(re.search(r'application/json">(.*?)</script>', slider.html(), re.DOTALL)[1])


def test_one_frame_for_each_value_in_order():
    drawn = []
    slider = make(draw=lambda power: drawn.append(power) or parabola(power))
    assert drawn == [1, 2, 3]
    shown = frames(slider)
    assert [frame["value"] for frame in shown] == ["1", "2", "3"]
    assert [frame["alt"] for frame in shown] == ["x to the 1", "x to the 2", "x to the 3"]
    assert len({frame["src"] for frame in shown}) == 3
    for frame in shown:
        assert base64.b64decode(frame["src"].removeprefix("data:image/png;base64,")).startswith(b"\x89PNG")


def test_it_opens_where_it_is_told():
    slider = make(start=3)
    first = re.search(r'<img src="([^"]+)" alt="([^"]+)"', slider.html())
    assert first[1] == frames(slider)[2]["src"] and first[2] == "x to the 3"
    assert 'value="2"' in slider.html() and slider.widget().children[0].value == 3
    with pytest.raises(ValueError):
        make(start=4)
