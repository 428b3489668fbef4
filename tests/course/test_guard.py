"""The guard: which code it lets through, and how it finds answers in what students hand in."""

import ast
import inspect

import pytest
from nbformat.v4 import new_code_cell, new_notebook

from tests.course.attacks import FINE, GRADED, OTHERS

pytest.importorskip("otter", reason="otter is not installed (the extra `course`)")

from course import course_guard
from course.course_guard import answers, literal, objections

MODULES = ["torch", "torch.nn.functional", "math", "numpy", "itertools"]
ALLOWED = {"edition": "a1-test", "modules": MODULES, "refused": {"backward": "by hand"}}
STARTER = "def f(x):\n    ..."


@pytest.mark.parametrize("code", [code for _, code in GRADED.values()] + [*OTHERS.values()])
def test_what_reaches_further_is_refused(code):
    assert objections(ast.parse(code), ALLOWED)


@pytest.mark.parametrize("code", FINE)
def test_what_computes_is_let_through(code):
    assert objections(ast.parse(code), ALLOWED) == []


def test_a_refused_name_says_what_to_do_instead():
    assert objections(ast.parse("x.backward()"), ALLOWED) == ["line 1 uses backward: by hand"]
    assert objections(ast.parse("def backward(x):\n    return x"), ALLOWED) == []


def test_attributes_of_self_may_be_set_where_an_assignment_needs_it_but_none_that_torch_has():
    classes = ALLOWED | {"stores": ["self", "ctx"]}
    assert objections(ast.parse("def f(ctx):\n    ctx.scale = 1"), classes) == []
    assert objections(ast.parse("def f(ctx):\n    ctx.allclose = 1"), classes)
    assert objections(ast.parse("def f(other):\n    other.scale = 1"), classes)


@pytest.mark.parametrize("name", [*MODULES, "torch.nn", "torch.autograd", "torch.linalg", "torch.special"])
def test_every_module_inside_of_a_module_is_refused_or_known_to_be_harmless(name):
    harmless = {
        "functional",
        "nn",
        "linalg",
        "special",
        "fft",
        "grad",
        "init",
        "parameter",
        "attention",
        "cpu",
    }
    harmless |= {
        "sparse",
        "strings",
        "polynomial",
        "emath",
        "exceptions",
        "dtypes",
        "common_types",
        "autograd",
    }
    harmless |= {"math"}
    module = pytest.importorskip(name)
    parts = {part for part, value in inspect.getmembers(module, inspect.ismodule)}
    assert {part for part in parts if not course_guard._closed(part)} <= harmless


def notebook(*codes, answer=()):
    made = new_notebook(cells=[new_code_cell(code) for code in codes])
    for index in answer:
        made.cells[index].metadata["tags"] = ["otter_answer_cell"]
    return made


def taken(*codes, starter=STARTER) -> tuple[str, list[str]]:
    """What is run for `f` of a submission, and what is said."""
    released = notebook("EDITION = 'a1-test'\nimport torch", starter, answer=[1])
    said = answers(released, notebook("EDITION = 'a1-test'", *codes), ALLOWED)
    return released.cells[1].source, said


def test_an_answer_is_found_by_its_name():
    assert taken("def f(x):\n    return x") == ("def f(x):\n    return x", [])
    assert taken("print(1)", "# mine\ndef f(x): return x")[0] == "def f(x):\n    return x"


def test_of_several_the_last_counts_that_is_filled_in():
    code, said = taken("def f(x):\n    return 1", "def f(x):\n    return 2", STARTER)
    assert "return 2" in code and not said
    assert "return 1" in taken("def f(x):\n    return 1", 'def f(x, y):\n    """To do."""\n    ...')[0]
    assert taken("x = 1", starter="x = ...")[0] == "x = 1"
    assert taken("x = 1", "x = ...", starter="x = ...")[0] == "x = 1"


def test_a_trial_that_takes_the_functions_name_is_no_answer():
    assert taken("def f(x):\n    return 1", "f = f(torch.zeros(1))")[0] == "def f(x):\n    return 1"
    assert taken("f = lambda x: x")[0] == "f = lambda x: x"


def test_what_an_answer_needs_of_other_cells_comes_along_and_nothing_else():
    helper = "import math\nmath_is_fun = open('x')\ndef half(x):\n    return x / TWO\nTWO = 2"
    code, said = taken(helper, "def f(x):\n    return half(math.sqrt(x))")
    assert not said and "def half" in code and "TWO = 2" in code and "import math" in code
    assert "open" not in code
    assert "uses open" in taken("def half(x):\n    return open(x)", "def f(x):\n    return half(x)")[1][0]


def test_an_answer_that_is_missing_broken_or_refused_leaves_the_starter_and_is_told():
    for codes, says in (
        (["x = 1"], "f: no cell defines it"),
        (["def f(x) return x"], "f: not run, line 1 is no Python"),
        (["def f(x):\n    return open(x)"], "f: not run, because line 2 uses open"),
        (["def f(x):\n    return '\0'"], "f: not run"),
    ):
        code, said = taken(*codes)
        assert code == STARTER and says in said[0]


def test_lines_for_ipython_are_left_out():
    code, said = taken("%%time\ndef f(x):\n    return x")
    assert code == "def f(x):\n    return x" and not said


def test_another_edition_is_refused_and_an_unknown_one_remarked():
    released = notebook("EDITION = 'a1-test'", STARTER, answer=[1])
    other = notebook("EDITION = 'a1-other'", "def f(x):\n    return x")
    assert answers(released, other, ALLOWED) == [
        "refused: this is edition a1-test, the notebook is of a1-other"
    ]
    assert released.cells[1].source == STARTER
    assert answers(released, notebook("def f(x):\n    return x"), ALLOWED) == [
        "the notebook does not say of which edition it is"
    ]


def test_names_and_numbers_are_read_without_running_anything():
    written = notebook("STUDENT = ...", "STUDENT = 'Ada'", "STUDENT = name()", "SHARES = [[0.1, 2]]", "a b")
    assert literal(written, "STUDENT") == "Ada" and literal(written, "SHARES") == [[0.1, 2]]
    assert literal(written, "OTHER") is None
