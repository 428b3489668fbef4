"""Plotting functions put the numbers they are given where they say they are."""

import numpy as np
import pytest
import torch
from matplotlib import pyplot as plt
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from atbook import plot
from atbook.lab.verdicts import Estimate, Share

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


def test_image_grid_shows_every_image_once_in_order():
    pixels = torch.arange(5 * 3 * 4 * 6).reshape(5, 3, 4, 6).to(torch.uint8)
    axes = drawn(plot.image_grid(pixels, titles=["a", "b"], columns=3)).axes
    assert len(axes) == 6 and [axis.get_title() for axis in axes] == ["a", "b", "", "", "", ""]
    for axis, image in zip(axes, pixels):
        assert (axis.images[0].get_array() == image.permute(1, 2, 0).numpy()).all()
    assert not axes[5].images and not any(axis.axison for axis in axes)


def test_image_grid_takes_floats():
    pixels = torch.rand(2, 3, 4, 4)
    shown = drawn(plot.image_grid(pixels)).axes[1].images[0].get_array()
    assert abs(shown - pixels[1].permute(1, 2, 0).numpy()).max() < 1e-6


def test_maps_share_one_colour_scale():
    figure = drawn(plot.maps(MAP.requires_grad_(), title="all heads", names=["first"]))
    *panels, _ = figure.axes
    assert [panel.get_title() for panel in panels] == [
        "first",
        "head 1",
        "head 2",
    ] and figure.get_suptitle() == "all heads"
    for panel, p in zip(panels, MAP):
        image = panel.images[0]
        assert (image.get_array() == p.detach().numpy()).all() and image.get_clim() == (
            0,
            pytest.approx(MAP.max().item()),
        )
        assert panel.get_xlabel() == "key"
    assert panels[0].get_ylabel() == "query"
    drawn(plot.maps(MAP[:1]))


def test_class_attention_lays_the_class_tokens_row_on_the_grid():
    image = torch.rand(3, 32, 32)
    picture, *panels, scale = drawn(plot.class_token_attention(image, MAP, grid=(4, 4), title="where")).axes
    assert abs(picture.images[0].get_array() - image.permute(1, 2, 0).numpy()).max() < 1e-6
    for head, panel in enumerate(panels):
        shown = panel.images[0].get_array()
        for row in range(4):
            for column in range(4):
                assert shown[row, column] == pytest.approx(MAP[head, 0, 1 + 4 * row + column].item())
        assert panel.get_title() == f"head {head}\nclass token {MAP[head, 0, 0].item():.2f}"
    assert len(panels) == 3 and {panel.images[0].get_clim() for panel in panels} == {(0, 1)}
    assert scale.get_ylim() == (0, 1) and scale.get_ylabel() == "share"
    wide = drawn(plot.class_token_attention(image, MAP, grid=(5, 3), prefix_tokens=2)).axes[1]
    assert (
        wide.images[0].get_array().shape == (5, 3) and f"{MAP[0, 0, :2].sum().item():.2f}" in wide.get_title()
    )


HISTORIES = {
    "copy": [{"step": 4, "loss": 2.0, "score": 0.1}, {"step": 8, "loss": 1.0}],
    "own name": [{"step": 4, "loss": 3.0}],
}


def test_curves_are_metric_over_steps():
    axis = drawn(plot.curves(HISTORIES, label="nats")).axes[0]
    assert [list(line.get_xdata()) for line in axis.lines] == [[4, 8], [4]]
    assert [list(line.get_ydata()) for line in axis.lines] == [[2.0, 1.0], [3.0]]
    assert [text.get_text() for text in axis.get_legend().get_texts()] == ["copy", "own name"]
    assert to_hex(axis.lines[0].get_color()) == plot.COLOURS["copy"].lower()
    assert (axis.get_xlabel(), axis.get_ylabel(), axis.get_yscale()) == ("step", "nats", "linear")
    assert drawn(plot.curves(HISTORIES, log=True)).axes[0].get_yscale() == "log"


def test_curves_skip_passes_without_the_metric_and_name_runs_without_it():
    only = {"copy": HISTORIES["copy"]}
    assert list(drawn(plot.curves(only, metric="score")).axes[0].lines[0].get_xdata()) == [4]
    with pytest.raises(ValueError, match="'own name'.*'score'"):
        plot.curves(HISTORIES, metric="score")


def test_every_method_has_its_own_colour():
    from atbook.lab.scales import PHOTO_METHODS, WORLD_METHODS
    from atbook.lab.studies import PARTLY_TUNED

    methods = {*WORLD_METHODS, *PHOTO_METHODS} - {"scratch-2", "scratch-3"}
    methods |= {variant.name for variant in PARTLY_TUNED.variants} | {"distill, tokens"}  # of chapter 16
    assert set(plot.COLOURS) == methods and len(set(plot.COLOURS.values())) == len(methods)


def test_estimates_are_drawn_where_they_are():
    """A panel a world: a dot at the mean, a bar from low to high, a small dot for each seed, an empty row
    where nothing is."""
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


def test_shares_are_drawn_in_per_cent_where_they_are():
    shares = {"here": Share(0.8, 0.6, 1.1), "there": Share(0.1, float("-inf"), float("inf"))}
    (axis,) = plot.kept_shares(shares).axes
    assert [tick.get_text() for tick in axis.get_yticklabels()] == ["here", "there"]
    bar, dot, *_ = axis.lines
    assert np.allclose(bar.get_xdata(), [60, 110]) and np.allclose(dot.get_xdata(), [80])
    assert np.allclose(axis.lines[3].get_xdata(), [10]) and np.allclose(axis.lines[3].get_ydata(), [1])
    assert [line.get_xdata()[0] for line in axis.lines[4:]] == [0, 50, 100]
    assert axis.get_xlim() == (-30, 130) and axis.get_ylim() == (1.5, -0.5), "read from above"
