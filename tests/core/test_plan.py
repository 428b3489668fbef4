"""Plans: one form for every way of writing them, and what they say through JSON."""

import dataclasses
import json

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from atlib import Plan

indices = st.lists(st.integers(0, 11), min_size=1, max_size=6, unique=True)


@settings(derandomize=True, deadline=None, max_examples=50)
@given(
    layers=st.dictionaries(st.integers(0, 11), st.integers(0, 23), min_size=1),
    heads=st.dictionaries(st.integers(0, 11), indices, min_size=1),
)
def test_mappings_come_to_one_form(layers, heads):
    plan = Plan(layers=layers, heads=heads)
    turned = {layer: iter(reversed(heads[layer])) for layer in reversed(heads)}
    backwards = Plan(layers=dict(reversed(layers.items())), heads=turned)
    assert plan == backwards and hash(plan) == hash(backwards)
    assert plan == dataclasses.replace(plan) == Plan(**json.loads(json.dumps(plan.describe())))
    assert dict(plan.pairs_of(12, 24)) == layers and plan.layers_of(12) == tuple(sorted(layers))
    for layer in range(12):
        assert plan.heads_of(layer, 12) == (tuple(sorted(heads[layer])) if layer in heads else None)


def test_which_layers_and_heads_take_part():
    assert Plan().pairs_of(3, 3) == ((0, 0), (1, 1), (2, 2)) and Plan().heads_of(0, 6) is None
    assert Plan(layers=[2, 0]).pairs_of(3, 3) == ((0, 0), (2, 2))
    assert Plan(layers={2: 0, 0: 5}).pairs_of(3, 6) == ((0, 5), (2, 0))
    plan = Plan(layers=np.arange(2), heads=np.array([1]))
    assert plan.heads_of(0, 3) == (1,) and all(type(i) is int for i in plan.layers)
