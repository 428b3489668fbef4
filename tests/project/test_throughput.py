"""The benchmark of throughput: its networks are those of the studies."""

from pathlib import Path

import pytest
from throughput import NETWORKS, Sizes

from atbook.lab.scales import scales
from atbook.lab.studies import CENTRAL, STUDIES
from atbook.lab.study import Place, Sources
from atlib import create_vit
from atlib.pair import student_of

SIZES = Sizes.of(create_vit("glyphs"))
# What the page of costs puts on one point with a network.
RECORDED = {
    "vit": (CENTRAL, "scratch"),
    "cait": (STUDIES["class-attention"], "cait, scratch"),
    "resmlp": (STUDIES["static-routing"], "resmlp"),
    "patch-conv": (STUDIES["one-softmax"], "attention"),
    "local": (STUDIES["locality"], "local, scratch, 1000 labels"),
    "binary": (STUDIES["bits"], "nothing, one-bit maps"),
}


def shapes(model):
    return {name: tuple(weight.shape) for name, weight in student_of(model).state_dict().items()}


@pytest.mark.parametrize("name", RECORDED)
def test_a_network_is_the_one_whose_accuracy_is_recorded(name):
    study, method = RECORDED[name]
    place = Place("find", None, Path("results"), Path("work"))
    trained = study.variant(method).build(Sources(place, scales()["find"], 0))
    measured = NETWORKS[name].build(SIZES)
    assert type(measured) is type(trained) and shapes(measured) == shapes(trained)
