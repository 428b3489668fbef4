"""The build of the book: notebooks side by side, errors that end it, and going on after it was stopped."""

import os
import re
import signal
import subprocess
import sys
from itertools import groupby

import pytest
from jupyter_cache import get_cache

from tests.helpers import ROOT, alive, until
from tools import build_book, execute, forked

TOP = "---\nfile_format: mystnb\nkernelspec: {name: python3, display_name: Python 3}\n---\n"
WAIT = "from pathlib import Path\nimport time\nwhile not Path('{}').exists():\n    time.sleep(0.05)\n"


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


@pytest.mark.slow
def test_notebooks_run_side_by_side_and_a_failing_one_is_named(tmp_path, capsys):
    """Two that wait for each other end only when they run at the same time."""
    cells = ("open('1', 'w')\n" + WAIT.format("2"), "import os\nprint(os.environ['OMP_NUM_THREADS'])")
    one = notebook(tmp_path, "one", *cells)
    cells = ("open('2', 'w')\n" + WAIT.format("1"), "print('page')\n1 / 0", "open('3', 'w')")
    two = notebook(tmp_path, "two", *cells)
    assert execute.execute([one, two], tmp_path / "cache", 60) == [two]
    said = capsys.readouterr()
    assert "two.md FAILED" in said.err and "ZeroDivisionError" in said.err and "1 / 0" in said.err
    assert outputs(tmp_path, one) == "1\n" and not (tmp_path / "3").exists()
    with pytest.raises(KeyError):
        outputs(tmp_path, two)


PROBE = """import os, signal, sys
print(sys.path, os.getcwd(), signal.getsignal(signal.SIGINT), __name__)
print(sorted((name, value) for name, value in os.environ.items() if name != "JPY_PARENT_PID"))
!echo said by a process
import torch, numpy
from matplotlib import get_backend, pyplot
print(get_backend(), torch.get_num_threads(), torch.manual_seed(1).initial_seed(), torch.rand(3))
print(pyplot.rcParams["font.size"])
pyplot.plot([1, 2])
from torch.utils.data import DataLoader
list(DataLoader(range(4), num_workers=2))"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="kernels are forked on Linux alone")
def test_a_forked_kernel_is_like_one_of_its_own_process(tmp_path):
    """Path, folder, environment, signals, threads, numbers, settings; figures and processes' words arrive."""
    (tmp_path / "matplotlibrc").write_text("font.size: 17\n")
    source = notebook(tmp_path, "probe", PROBE, "import tools")
    _, alone, _, missing = execute.run(source, 300)
    # from a server for which figures go elsewhere
    with forked.kernels(execute.surroundings() | {"MPLBACKEND": "agg"}):
        _, fork, _, missing_too = execute.run(source, 300)
    assert "No module named 'tools'" in str(missing) and "No module named 'tools'" in str(missing_too)
    first, second = (nb.cells[0].outputs for nb in (alone, fork))
    # what is printed in one cell may arrive in several parts
    kinds, same = ([kind for kind, _ in groupby(x.output_type for x in cell)] for cell in (first, second))
    assert same == kinds
    texts, same = ("".join(x.text for x in cell if x.output_type == "stream") for cell in (first, second))
    assert same == texts and "said by a process" in same and "inline" in same and "\n17.0\n" in same
    pictures, same = (
        [
            re.sub("<dc:date>.*", "", output.data["image/svg+xml"])
            for output in cell
            if "image/svg+xml" in output.get("data", {})
        ]
        for cell in (first, second)
    )
    assert len(same) == 1 and same == pictures


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda number: number.name)
def test_a_stopped_build_goes_on_and_leaves_no_kernel(tmp_path, number):
    notebook(tmp_path, "first", "open('runs', 'a').write('x')")
    notebook(
        tmp_path,
        "second",
        "import os\nopen('pid.new', 'w').write(str(os.getpid()))\nos.rename('pid.new', 'pid')\n"
        + WAIT.format("go"),
    )
    program = (
        "from tools.execute import *\nforked.IMPORTED.clear()\n"  # these notebooks need none of them
        "print(execute([Path('first.md'), Path('second.md')], Path('cache'), 600))"
    )
    command = [sys.executable, "-c", program]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    build = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=tmp_path)
    assert build.stdout.readline().startswith("first: ")
    assert until(lambda: (tmp_path / "pid").exists() or build.poll() is not None) and build.poll() is None
    build.send_signal(number)
    assert build.wait(60) == (-number if number == signal.SIGKILL else 128 + number)
    build.stdout.close()
    kernel = int((tmp_path / "pid").read_text())
    assert until(lambda: not alive(kernel))
    if number == signal.SIGTERM:
        return  # no less is left than after SIGKILL

    (tmp_path / "go").touch()
    options = {"capture_output": True, "text": True, "cwd": tmp_path, "timeout": 300, "check": True}
    again = subprocess.run(command, env=environment, **options)
    assert again.stdout.startswith("1 of 2 ") and again.stdout.endswith("[]\n")
    assert (tmp_path / "runs").read_text() == "x", "the first had run, and did not run again"


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
