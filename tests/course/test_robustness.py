"""What comes in odd costs its student a remark at most; right answers in other styles get their points."""

import io
import json
import time
import zipfile

import pytest

from atbook.exercises import answers
from tests.course.helpers import as_notebook, only, replace, solution
from tools.grades import graded
from tools.handed import handed_in


def a_zip(files: dict[str, bytes]):
    """A function that writes a zip of some files."""

    def write(path):
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in files.items():
                archive.writestr(name, content)

    return write


def a_bomb(path) -> None:
    """A zip of little size that holds much."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("a1.ipynb", "w") as file:
        for _ in range(4):
            file.write(bytes(20_000_000))


# {file: what is in it, and a part of the remark}; of these none can be graded.
REFUSED = {
    "broken.ipynb": (b'{"cells": [', "no notebook that can be read"),
    "empty.ipynb": (b"", "no notebook that can be read"),
    "deep.ipynb": (b'{"cells": ' + b"[" * 10**5, "no notebook that can be read"),
    "empty.zip": (b"", "not a zip file"),
    "nothing.zip": (a_zip({"a.txt": b""}), "holds 0 notebooks"),
    "two.zip": (a_zip({"a.ipynb": b"{}", "b.ipynb": b"{}"}), "holds 2 notebooks"),
    "bomb.zip": (a_bomb, "more than 60 MB"),
    "many.zip": (a_zip({str(number): b"" for number in range(2001)}), "2001 files"),
    "other.ipynb": (b'{"cells": [{"cell_type": "code", "source": "EDITION = \'a1-0\'"}]}', "edition a1-"),
}


def test_what_cannot_be_graded_costs_one_student_one_remark(edition, cage, tmp_path):
    for name, (content, _) in REFUSED.items():
        content(tmp_path / name) if callable(content) else (tmp_path / name).write_bytes(content)
    (tmp_path / "zz.ipynb").write_bytes(as_notebook(solution(edition)))
    results = {one.file: graded(one, only(edition, "q1"), cage) for one in handed_in(tmp_path, [])}
    assert results.pop("zz.ipynb").total == 5
    assert results.keys() == REFUSED.keys()
    for name, (_, says) in REFUSED.items():
        (remark,) = results[name].remarks
        assert results[name].status == "refused" and says in remark, name


# {what is odd: (the answer that it replaces, or "" for a cell before all; code; points; part of a remark)}.
ODD = {
    "a name that cannot be compared": ("STUDENT", 'STUDENT = {["Ada"]}', 11, "has to be typed in"),
    "a name of a million letters": ("STUDENT", f"STUDENT = '{'a' * 10**6}'", 11, "STUDENT has to be"),
    "no name": ("STUDENT", "STUDENT = ...", 11, "STUDENT is not filled in"),
    "two names": ("STUDENT", 'STUDENT = "Bob"\nSTUDENT = "model solution"', 15, "different values"),
    "half a letter in an answer": ("talking", "def talking(q, k, v, mix):\n    '\ud800'", 10, "talking"),
    "a number of 400 digits": ("SHARES", f"SHARES = [[{'9' * 400}] * 4] * 4", 11, "typed in"),
    "a table that is too deep": ("SHARES", f"SHARES = {'[' * 80}{']' * 80}", 11, ""),
    "a zero byte": ("talking", "def talking(q):\n    '\0'", 10, "no Python"),
    "no Python elsewhere": ("", "this is no Python", 15, ""),
    "an answer that was deleted": ("talking", "", 10, "no cell defines it"),
    "a starter": ("talking", "def talking(q, k, v, mix):\n    ...", 10, "not done"),
    "nan": ("talking", "def talking(q, k, *a):\n    return 0 * q / 0, 0 * q @ k.mT / 0", 10, ""),
    "more than can be read": ("talking", "def talking(q, *a):\n    return 'x' * 10**8, q", 10, "letters"),
    "nest": (
        "talking",
        "def talking(q, *a):\n    x = []\n    x.append(x)\n    return x, q",
        10,
        "more than can",
    ),
    "an exit of the cell": ("", "exit = None\nimport sys\nsys.exit(0)", 15, ""),
    "a trial under the answer's name": ("", "talking = 3", 15, ""),
}


@pytest.mark.parametrize("name", ODD)
def test_what_is_odd_costs_no_more_than_its_task(edition, cage, name, monkeypatch):
    monkeypatch.setattr("atbook.cage.outside.SECONDS", 3.0)
    slot, code, points, says = ODD[name]
    handed = solution(edition)
    if slot:
        replace(handed, slot, code)
    else:
        handed.code.insert(0, code)
    result = graded(handed, edition, cage)
    told = " ".join([*result.remarks, *(test.says for tests in result.tests.values() for test in tests)])
    assert (result.status, result.total) == ("graded", points) and says in told
    told.encode()  # it can be written


def test_a_loop_costs_one_test_its_time_and_the_others_none(edition, cage, monkeypatch):
    monkeypatch.setattr("atbook.cage.outside.SECONDS", 2.0)
    handed = replace(solution(edition), "talking", "def talking(*a):\n    while True: pass")
    result = graded(handed, edition, cage)
    first, *rest = result.tests["q1"]
    assert "did not end within 2 s" in first.says and result.total == 10
    assert all("used up before" in test.says for test in rest)


# --- Right answers in other styles, and honest work that is odd ---

BODY = "p = ((q @ k.mT / q.shape[-1] ** 0.5).transpose(1, 3) @ mix.T).transpose(1, 3).softmax(-1)"
END = "return (p @ v).transpose(1, 2).flatten(2), p"
HEAD = "def talking(q, k, v, mix):"


def styled(*lines: str, before: str = "", end: str = END, body: str = BODY, head: str = HEAD) -> str:
    """The answer with some lines in it, and some before it."""
    return f"{before}\n{head}\n" + "".join(f"    {line}\n" for line in (*lines, body, end))


STYLES = {
    "a question mark at the end of a cell": styled() + "\ntalking?",
    "everything of torch": styled(before="from torch import *\nimport torch"),
    "a named tuple": styled(
        before="from typing import NamedTuple\nclass Both(NamedTuple):\n    output: object\n"
        "    maps: object\n",
        end="return Both((p @ v).transpose(1, 2).flatten(2), p)",
    ),
    "numpy returned": styled(end="return (p @ v).transpose(1, 2).flatten(2).numpy(), p.numpy()"),
    "a helper in another cell": styled(body="p = maps_of(q, k, mix)"),
    "a class that is called": (
        "class Talking:\n    def __call__(self, q, k, v, mix):\n"
        f"        {BODY}\n        {END}\ntalking = Talking()\n"
    ),
    "a lambda": "maps = lambda q, k, mix: maps_of(q, k, mix)\n"
    "talking = lambda q, k, v, mix: ((maps(q, k, mix) @ v).transpose(1, 2).flatten(2), maps(q, k, mix))\n",
    "a decorator": styled(before="import functools\n@functools.lru_cache"),
    "a partial": styled(
        before="", head="def any_talking(half, q, k, v, mix):", body=BODY.replace("0.5", "half")
    )
    + "\nfrom functools import partial\ntalking = partial(any_talking, 0.5)\n",
    "a comment in another language": "# día, 日本語, 🙂\n" + styled(),
    "under a condition": "if True:\n" + "\n".join(f"    {line}" for line in styled().splitlines()),
    "Windows lines": styled().replace("\n", "\r\n"),
    "the same answer twice in a cell": styled(end="return 0, 0") + styled(),
}
HELPER = f"def maps_of(q, k, mix):\n    {BODY}\n    return p\n"


def halved(before: str, half: str) -> list[str]:
    """Two cells: one that makes a half in some way, and the answer that takes it from there."""
    return [before, styled(body=BODY.replace("0.5", half))]


def rewritten(change):
    """A function that writes a notebook's content in another form."""
    return lambda content: json.dumps(change(json.loads(content))).encode()


def in_version_3(book):
    for cell in book["cells"]:
        if cell["cell_type"] == "code":
            cell["input"] = cell.pop("source")
    return {"nbformat": 3, "worksheets": [{"cells": book["cells"]}]}


def zipped(name: str, **others: bytes):
    """A function that puts a notebook into a zip, beside others."""

    def put(content: bytes) -> bytes:
        file = io.BytesIO()
        a_zip({name: content, **others})(file)
        return file.getvalue()

    return put


HONEST_CELLS = {
    "display": ["import torch", styled("display(q.shape)")],
    "a setting of IPython": ["get_ipython().run_line_magic('matplotlib', 'inline')", styled()],
    "a count that is global": ["CALLS = 0", styled("global CALLS", "CALLS += 1")],
    "a global that a function sets": halved(
        "def set_up():\n    global HALF\n    HALF = 0.5\nset_up()", "HALF"
    ),
    "everything of another cell": [
        "from math import *",
        styled(body=BODY.replace("q.shape[-1] ** 0.5", "sqrt(q.size(-1))")),
    ],
    "everything of what is not here": ["from google.colab.files import *", styled()],
    "a default dtype of another cell": [
        "torch.set_default_dtype(torch.float64)",
        styled(
            "z = q @ k.mT / q.shape[-1] ** 0.5",
            "mixed = torch.zeros(len(q), len(mix), *z.shape[2:])",
            "assert mixed.dtype == torch.float64",
            "for g in range(len(mix)): mixed[:, g] = (mix[g, :, None, None] * z).sum(1)",
            body="p = mixed.softmax(-1)",
        ),
    ],
    "a list that a loop fills": halved(
        "halves = []\nfor n in range(3):\n    halves.append(n / 2)", "halves[1]"
    ),
    "an attribute of a function": halved("def f():\n    return f.half\nf.half = 0.5", "f()"),
    "an import that may fail": halved(
        "try:\n    import jax\nexcept ImportError:\n    jax = None", "(0.5 if not jax else 0)"
    ),
    "deeper than usual": halved(
        "import sys\nsys.setrecursionlimit(5000)\ndef down(n):\n    return 0.5 if n == 0 else down(n - 1)",
        "down(3000)",
    ),
    "magics, help and commands": [
        "%load_ext autoreload\n!pip install einops\nfiles = !ls\ntorch.einsum??\n?torch.einsum",
        styled(),
    ],
    "a magic, and lines that ask": [
        styled(
            '"""Which head talks?\n\n    All."""',
            "half = 0.5  # or a quarter?",
            "# why?",
            "assert (3 * 4\n            % 5) == 2",
            body=BODY.replace("0.5", "half"),
            before="%%time",
        )
    ],
    "nothing but a magic under a condition": [
        "import sys\nif 'google.colab' in sys.modules:\n    %pip install einops\n\n" + styled()
    ],
    "a newer Python in a cell of trials": [
        "def shown[T](x: T) -> T:\n    return x\ntype Map = int",
        styled(),
    ],
    "trials that fail": ["talking(1, 2)\n1 / 0\nopen('nowhere')", f"assert False, 'my own test'\n{styled()}"],
    "an older answer left above": [styled(end="return 0, 0"), styled()],
}
HONEST_FILES = {
    "a byte order mark.ipynb": lambda content: b"\xef\xbb\xbf" + content,
    "sources as lists.ipynb": rewritten(
        lambda book: book | {"cells": [c | {"source": c["source"].splitlines(True)} for c in book["cells"]]}
    ),
    "an older notebook.ipynb": rewritten(in_version_3),
    "backslashes.zip": zipped("Ada\\a1.ipynb"),
    "beside a Mac's files.zip": zipped(
        "work/a1.ipynb",
        **{"__MACOSX/._a1.ipynb": b"", ".DS_Store": b"", "torch.py": b"1/0"},
        **{".ipynb_checkpoints/a1-checkpoint.ipynb": b'{"cells": []}'},
    ),
    "Müller 作业 (final).ipynb": lambda content: content,
}


@pytest.mark.parametrize("name", [*STYLES, *HONEST_CELLS, *HONEST_FILES])
def test_honest_work_that_is_odd_has_its_points(edition, cage, tmp_path, name):
    handed = solution(edition)
    *before, answer = HONEST_CELLS.get(name, [STYLES.get(name, styled())])
    replace(handed, "talking", answer).code[1:1] = before
    handed.code.append(HELPER)
    content, file = as_notebook(handed), name if name in HONEST_FILES else "a1.ipynb"
    (tmp_path / file).write_bytes(HONEST_FILES.get(name, bytes)(content))
    (back,) = handed_in(tmp_path, [])
    result = graded(back, only(edition, "q1"), cage)
    assert result.total == 5, result


def test_a_name_that_begins_with_a_dot_gets_a_line(edition, cage, tmp_path):
    work = as_notebook(solution(edition))
    (tmp_path / ".a1.ipynb").write_bytes(work)
    for junk in ("._a1.ipynb", ".DS_Store", ".ipynb_checkpoints/a1-checkpoint.ipynb", "__MACOSX/a1.ipynb"):
        (tmp_path / junk).parent.mkdir(exist_ok=True)
        (tmp_path / junk).write_bytes(work)
    (tmp_path / "b.zip").write_bytes(zipped("Ada/.a1.ipynb")(work))
    results = {h.file: graded(h, only(edition, "q1"), cage) for h in handed_in(tmp_path, [])}
    assert results.keys() == {".a1.ipynb", "b.zip"}
    assert all("begins with a dot" in result.remarks[0] for result in results.values())


TYPED = ("np.array({})", "tuple({})", "torch.tensor({}).tolist()")


@pytest.mark.parametrize("style", TYPED)
def test_typed_numbers_may_stand_in_a_tensor(edition, cage, style):
    handed = solution(edition)
    at = next(number for number, code in enumerate(handed.code) if code.startswith("SHARES = "))
    handed.code[at] = "SHARES = " + style.format(handed.code[at].removeprefix("SHARES = "))
    assert graded(handed, only(edition, "q3"), cage).total == 4


# --- Folders, zips and platforms ---


def test_the_names_of_platforms_are_read_and_uploads_found(edition, tmp_path):
    notebook = as_notebook(solution(edition))
    for name in (
        "lovelaceada_LATE_123_9001_a2-1.ipynb",
        "bobbob_77_9003_a2.ipynb",
        "Cy Young_55_assignsubmission_file/a2 (1).ipynb",
        "dora/a2.ipynb",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(notebook)
    (tmp_path / "lovelaceada_LATE_123_9002_student-1.safetensors").write_bytes(b"ada's")
    (tmp_path / "Cy Young_55_assignsubmission_file" / "student.safetensors").write_bytes(b"cy's")
    (tmp_path / "dora" / "student.safetensors").write_bytes(b"dora's")
    (tmp_path / "dora" / "notes.txt").write_bytes(b"")
    everybody = handed_in(tmp_path, ["student.safetensors"])
    read = {(*h.owner[:2], h.owner.late): h.contents()[1].get("student.safetensors") for h in everybody}
    assert read == {
        ("lovelaceada", "123", True): b"ada's",
        ("bobbob", "77", False): None,
        ("Cy Young", "55", False): b"cy's",
        ("dora", "", False): b"dora's",
    }


LONG = {
    "lines": "\n" * 100_000 + "((",
    "a chain": "".join(f"a{n + 1} = a{n}\n" for n in range(4000)),
    "one name": "a = a + 1\n" * 8000,
    "entries": "x = 1\n" + "".join(f"x.a[{n}] = x\n" for n in range(4000)),
    "spaces": "?" + " " * 100_000 + "x",
    "long": "z" * 600_000,
}


@pytest.mark.parametrize("text", LONG.values(), ids=LONG)
def test_a_text_takes_no_longer_than_its_length_allows(text):
    start = time.process_time()
    answers.answer("f", [text, "def f():\n    return a4000, a, x\n"], [])
    answers.edition_of([text]), answers.typed("f", [text])
    assert time.process_time() - start < 20
