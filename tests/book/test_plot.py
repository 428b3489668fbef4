"""Plotting functions put the numbers they are given where they say they are."""

import numpy as np
import pytest
import torch
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from atbook import plot
from atbook.lab.verdicts import Estimate

MAP = torch.rand(3, 17, 17, generator=torch.Generator().manual_seed(0)).softmax(-1)


@pytest.fixture(autouse=True)
def returned_closed(monkeypatch):
    """Every function hands back a figure that pyplot no longer knows, so that a notebook shows it once."""
    plt.close("all")
    yield
    assert plt.get_fignums() == []


def drawn(figure):
    """Draw it: an error in the layout appears only then."""
    assert isinstance(figure, Figure)
    figure.canvas.draw()
    return figure


def test_maps_share_one_colour_scale():
    figure = drawn(plot.maps(MAP.requires_grad_(), title="all heads", names=["first"]))
    *panels, _ = figure.axes
    assert [panel.get_title() for panel in panels] == ["first", "head 1", "head 2"]
    assert figure.get_suptitle() == "all heads"
    for panel, p in zip(panels, MAP):
        image = panel.images[0]
        assert (image.get_array() == p.detach().numpy()).all()
        assert image.get_clim() == (0, pytest.approx(MAP.max().item()))
        assert panel.get_xlabel() == "key"
    assert panels[0].get_ylabel() == "query"
    drawn(plot.maps(MAP[:1]))


def test_estimates_are_drawn_where_they_are():
    """A panel a world: a dot at the mean, a bar from low to high, a small dot for each seed."""
    worlds = {
        "Find": {"copy": Estimate(0.9, 0.85, 0.95, 0.0, 2, 4000, (0.88, 0.92))},
        "Match": {
            "copy": Estimate(0.8, 0.7, 0.9, 0.0, 2, 4000, (0.7, 0.9)),
            "scratch": Estimate(0.1, 0.1, 0.1, 0.0, 2, 4000, (0.1, 0.1)),
        },
    }
    figure = plot.estimates(worlds, {"scratch": "no teacher", "copy": "the maps"}, chance=0.125)
    find, match = figure.axes
    assert [axis.get_title() for axis in (find, match)] == ["Find", "Match"]
    assert [tick.get_text() for tick in find.get_yticklabels()] == ["no teacher", "the maps"]
    chance, *lines = find.lines
    assert list(chance.get_xdata()) == [12.5, 12.5]
    bar, seeds, dot = lines
    assert np.allclose(bar.get_xdata(), [85, 95]) and np.allclose(bar.get_ydata(), [1, 1])
    assert np.allclose(dot.get_xdata(), [90]) and np.allclose(dot.get_ydata(), [1])
    assert np.allclose(seeds.get_xdata(), [88, 92]) and 1 < seeds.get_ydata()[0] < 1.5
    apart = plot.estimates(worlds, {"copy": "the maps"}, chance={"Find": 0.1, "Match": 0.5})
    assert [axis.lines[0].get_xdata()[0] for axis in apart.axes] == [10, 50]
    assert len(match.lines) == 7 and {text.get_text() for text in match.texts} == {"10.0", "80.0"}


def test_two_groups_are_drawn_as_seeds_without_a_mean():
    of = Estimate(0.62, 0.3, 0.94, 0.0, 4, 4000, (0.8, 0.14, 0.9, 0.84))
    (axis,) = plot.estimates({"Find": {"copy": of}}, {"copy": "the maps"}, chance=0.125).axes
    _, low, high = axis.lines
    assert np.allclose(low.get_xdata(), [14]) and np.allclose(high.get_xdata(), [80, 84, 90])
    assert [text.get_text() for text in axis.texts] == ["1 of 4 seeds", "3 of 4 seeds"]
    assert plot.two_groups((0.5, 0.2, 0.8)) == plot.two_groups((0.3,)) == ()
