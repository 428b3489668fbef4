"""Plans: one form for every way of writing them, what they say through JSON, and a message of its own for
every wrong one."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atlib import Plan
from atlib.plan import AVERAGES, HOW, ROWS, UNEQUAL_HEADS, UNEQUAL_PREFIX, WHAT

PLANS = [
    Plan(),
    Plan(what="v", how="distill", layers=range(9), share_drop_path=False),
    Plan(layers={3: 0, 0: 11}, heads=[2, 0]),
    Plan(layers={0: 1}, heads={0: [0]}),
    Plan(layers=[0, 1], heads=[0, 1]),
    Plan(heads={1: range(2), 0: [5]}, mismatched=True),
    Plan(heads={0: [0, 1]}),
    Plan(average="queries", unequal_heads="average", unequal_grid="resample", unequal_prefix="drop"),
    Plan(rows="patches", unequal_prefix="own", unequal_grid="resample", heads=[1]),
]


def test_what_there_is_to_choose_from():
    assert (WHAT, HOW) == (("map", "q", "k", "v"), ("copy", "distill"))
    assert AVERAGES == ("layers", "heads", "queries")
    assert UNEQUAL_HEADS == ("aggregate", "average", "learn")
    assert (UNEQUAL_PREFIX, ROWS) == (("drop", "own"), ("class", "patches"))


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_plan_survives_json_and_replace(plan):
    described = json.loads(json.dumps(plan.describe()))
    assert set(described) == {field.name for field in dataclasses.fields(Plan)}
    assert Plan(**described) == plan and hash(Plan(**described)) == hash(plan)
    assert dataclasses.replace(plan) == plan
    assert dataclasses.replace(plan, share_drop_path=not plan.share_drop_path).layers == plan.layers
    assert dataclasses.replace(plan, share_drop_path=not plan.share_drop_path).heads == plan.heads


indices = st.lists(st.integers(0, 11), min_size=1, max_size=6, unique=True)


@settings(derandomize=True, deadline=None, max_examples=50)
@given(
    layers=st.dictionaries(st.integers(0, 11), st.integers(0, 23), min_size=1),
    heads=st.dictionaries(st.integers(0, 11), indices, min_size=1),
)
def test_mappings_come_to_one_form(layers, heads):
    plan = Plan(layers=layers, heads=heads)
    backwards = Plan(
        layers=dict(reversed(layers.items())),
        heads={layer: iter(reversed(heads[layer])) for layer in reversed(heads)},
    )
    assert plan == backwards and hash(plan) == hash(backwards)
    assert plan == dataclasses.replace(plan) == Plan(**json.loads(json.dumps(plan.describe())))
    assert dict(plan.pairs_of(12, 24)) == layers and plan.layers_of(12) == tuple(sorted(layers))
    for layer in range(12):
        assert plan.heads_of(layer, 12) == (tuple(sorted(heads[layer])) if layer in heads else None)


def test_which_layers_and_heads_take_part():
    assert Plan().pairs_of(3, 3) == ((0, 0), (1, 1), (2, 2)) and Plan().heads_of(0, 6) is None
    assert Plan(layers=[2, 0]).pairs_of(3, 3) == ((0, 0), (2, 2))
    assert Plan(layers={2: 0, 0: 5}).pairs_of(3, 6) == ((0, 5), (2, 0))
    assert [Plan(heads=range(2)).heads_of(layer, 3) for layer in range(2)] == [(0, 1), (0, 1)]


WRONG = [
    ({"what": "query"}, "what 'query'.*'map', 'q', 'k', 'v'"),
    ({"what": "maps"}, "what 'maps'.*'map'"),
    ({"how": "distil"}, "how 'distil'.*'distill'"),
    ({"how": None}, "how None"),
    ({"average": "layer"}, "average 'layer'.*'layers'"),
    ({"average": "examples"}, "average='examples'.*batch.*MeanMapCopy"),
    ({"average": False}, "average False"),
    ({"unequal_heads": "mean"}, "unequal_heads 'mean'"),
    ({"unequal_grid": True}, "unequal_grid True.*'resample'"),
    ({"unequal_prefix": "remove"}, "unequal_prefix 'remove'.*'drop'"),
    ({"layers": {}}, r"layers .* \[\]"),
    ({"layers": []}, r"layers .* \[\]"),
    ({"layers": [1, 1]}, r"layers .* \[1, 1\]"),
    ({"layers": [0, -1]}, r"layers .* \[-1\]"),
    ({"layers": [0.0]}, r"layers .* \[0.0\]"),
    ({"layers": [True]}, r"layers .* \[True\]"),
    ({"layers": "01"}, r"layers .* \['0', '1'\]"),
    ({"layers": -1}, r"layers=-1.*range\(12 - n, 12\)"),
    ({"layers": 3}, r"layers=3.*\[3\]"),
    ({"layers": {-1: 0}}, r"layers .* \[-1\]"),
    ({"layers": {0: -2}}, r"layers .* \[-2\]"),
    ({"layers": {0: 1.0}}, r"layers .* \[1.0\]"),
    ({"layers": {0: None}}, r"layers .* \[None\]"),
    ({"heads": []}, r"heads .* \[\]"),
    ({"heads": [0, 0]}, r"heads .* \[0, 0\]"),
    ({"layers": [[0, 1], [0, 0]]}, "names a layer twice"),
    ({"heads": 3}, r"heads=3.*\[3\]"),
    ({"heads": [-1]}, r"heads .* \[-1\]"),
    ({"heads": {0: []}}, r"heads of layer 0 .* \[\]"),
    ({"heads": {0: 1}}, "heads of layer 0=1"),
    ({"heads": {0: [True]}}, r"layer 0 .* \[True\]"),
    ({"heads": {-1: [0]}}, r"heads' layers .* \[-1\]"),
    ({"what": "q", "average": "heads"}, "average='heads' .* 'q'"),
    ({"what": "k", "unequal_heads": "average"}, "unequal_heads='average' .* 'k'"),
    ({"what": "v", "unequal_grid": "resample"}, "unequal_grid='resample' .* 'v'"),
    ({"what": "q", "unequal_prefix": "drop"}, "unequal_prefix='drop' .* 'q'"),
    ({"heads": [0], "unequal_heads": "aggregate"}, "heads=.*unequal_heads="),
    ({"how": "copy", "unequal_heads": "learn"}, "'learn'.*how='distill'"),
    ({"rows": "class token"}, "rows 'class token'.*'class', 'patches'"),
    ({"what": "q", "rows": "class"}, "rows='class' .* 'q'"),
    ({"what": "v", "unequal_prefix": "own"}, "unequal_prefix='own' .* 'v'"),
    ({"rows": "class", "average": "queries"}, "rows='class' .* average='queries'"),
    ({"rows": "patches", "unequal_heads": "average"}, "rows='patches' .* unequal_heads='average'"),
    ({"unequal_prefix": "own", "average": "heads"}, "unequal_prefix='own' .* average='heads'"),
    ({"unequal_prefix": "own", "unequal_heads": "aggregate"}, "'own' .* unequal_heads='aggregate'"),
]


@pytest.mark.parametrize("arguments, named", WRONG, ids=str)
def test_wrong_plans_are_refused(arguments, named):
    with pytest.raises(ValueError, match=named):
        Plan(**arguments)


@pytest.mark.parametrize(
    "plan, depths, named",
    [
        (Plan(layers=[0, 12]), (12, 12), "layer 12.*12"),
        (Plan(layers={4: 0}), (4, 12), "layer 4.*4"),
        (Plan(layers={0: 12}), (4, 12), "teacher's layer 12.*12"),
    ],
    ids=str,
)
def test_layers_that_do_not_exist(plan, depths, named):
    with pytest.raises(ValueError, match=named):
        plan.pairs_of(*depths)


@pytest.mark.parametrize("plan", [Plan(heads=[0, 3]), Plan(heads={2: [3]})], ids=str)
def test_heads_that_do_not_exist(plan):
    with pytest.raises(ValueError, match="head 3 of layer 2"):
        plan.heads_of(2, 3)


def test_numpy_integers_are_integers():
    assert (
        Plan(layers=np.arange(2), heads=np.array([1])).describe() == Plan(layers=[0, 1], heads=[1]).describe()
    )
    assert all(type(i) is int for i in Plan(layers=np.arange(2)).layers)
