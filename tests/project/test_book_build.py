"""The build of the book: an error is no output, and outputs last as long as what they come from."""

import pytest
from jupyter_cache import get_cache
from nbformat.v4 import new_output

from tools import build_book, execute

TOP = "---\nfile_format: mystnb\nkernelspec: {name: python3, display_name: Python 3}\n---\n"


def notebook(folder, name, *cells):
    text = TOP + "".join(f"\n```{{code-cell}} ipython3\n{cell}\n```\n" for cell in cells)
    (folder / f"{name}.md").write_text(text)
    return folder / f"{name}.md"


def outputs(folder, source):
    """What the cells of a notebook printed, from the cache."""
    cache = get_cache(folder / "cache")
    record = cache.match_cache_notebook(execute.myst_nb_reader_plugin(str(source)))
    cells = cache.get_cache_bundle(record.pk).nb.cells
    return "".join(output.text for cell in cells for output in cell.get("outputs", []))


@pytest.fixture
def ran(monkeypatch):
    """The notebooks that ran, for tests that start no kernel: every cell prints 1."""
    names = []

    def run(source, limit):
        names.append(source.stem)
        notebook = execute.myst_nb_reader_plugin(str(source))
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.outputs = [new_output("stream", text="1\n")]
        return source, notebook, 0.0, None

    monkeypatch.setattr(execute, "run", run)
    return names


def test_a_notebook_that_fails_is_named_and_has_no_outputs(tmp_path, ran, monkeypatch):
    source, right = notebook(tmp_path, "one", "1 / 0"), execute.run
    monkeypatch.setattr(execute, "run", lambda *of: (*right(*of)[:3], ZeroDivisionError("in a cell")))
    assert execute.execute([source], tmp_path / "cache", 60) == [source]
    with pytest.raises(KeyError):
        outputs(tmp_path, source)


@pytest.mark.parametrize("left", [None, "", '{"cells": ['], ids=["no file", "empty file", "half a file"])
def test_half_written_outputs_are_no_outputs(tmp_path, ran, left):
    source = notebook(tmp_path, "one", "print(1)")
    execute.execute([source], tmp_path / "cache", 60)
    assert execute.execute([source], tmp_path / "cache", 60) == [] and ran == ["one"]
    (file,) = (tmp_path / "cache" / "executed").rglob("base.ipynb")
    file.unlink() if left is None else file.write_text(left)
    assert execute.execute([source], tmp_path / "cache", 60) == [] and ran == ["one", "one"]
    assert outputs(tmp_path, source) == "1\n"


def test_outputs_last_as_long_as_library_and_records(tmp_path, monkeypatch):
    for name, path in {"ROOT": "", "BUILD": "_build", "OUTPUTS": "_build/cache", "KEY": "_build/key"}.items():
        monkeypatch.setattr(build_book, name, tmp_path / path)
    # Also where the checkout lies in a folder of that name, and what the book quotes and shows in the page.
    names = ("requirements.lock", "atlib/vit.py", "atbook/explorer/widget.py", "book/papers/one.json")
    files = [tmp_path / name for name in names]
    for path in files:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("one")

    def outputs_stay():
        build_book.OUTPUTS.mkdir(parents=True, exist_ok=True)
        build_book.forget_stale_outputs(build_book.outputs_depend_on())
        return build_book.OUTPUTS.exists()

    assert not outputs_stay() and outputs_stay()
    for path in files:
        path.write_text("two")
        assert not outputs_stay() and outputs_stay()
    # A removal that is stopped half-way, and then the change is taken back: what is left is not all.
    monkeypatch.setattr(build_book.shutil, "rmtree", lambda *arguments, **options: 1 / 0)
    files[0].write_text("three")
    with pytest.raises(ZeroDivisionError):
        outputs_stay()
    monkeypatch.undo()
    assert not (tmp_path / "_build" / "key").exists()
