"""The library as an installation leaves it: a wheel in an environment of its own, used far from any clone."""

import json
import os
import re
import shutil
import site
import subprocess
import sys
import tomllib
import venv
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest

from atrun.record import read_record
from tests.helpers import ROOT, made_once

pytestmark = pytest.mark.slow

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# Of the clone: what belongs into the wheel, and what must stay out of it although setuptools could find it.
COPIED = ("atlib", "atfamily", "atrun", "atbook", "tests", "tools", "benchmarks", "notebooks", "configs")
COPIED_FILES = ("pyproject.toml", "README.md", "LICENSE", "LICENSE-TEXT")
# README's example with a teacher that is here and images that take no time: (what it says, what runs).
README_CHANGES = (
    ('"vit_small_patch16_224.dino", pretrained=True', '"vit_tiny_patch16_224", img_size=32'),
    ("torch.randn(8, 3, 224, 224)", "torch.randn(8, 3, 32, 32)"),
)
README_CHECKS = """
import timm
assert all(parameter.grad is None for parameter in teacher.parameters())
assert any(parameter.grad is not None for parameter in student.parameters())
vit = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=100)
vit.load_state_dict(torch.load("student.pt"))
"""


HEAVY = {*"accelerate datasets pandas pyarrow matplotlib ipywidgets jupyter_book hypothesis".split()}
# What is imported, and which of the heavy ones may come with it.
STEPS = {
    "import torch, timm, atlib; from atlib import AttentionTransfer, create_student": set(),
    "from atbook.worlds import marked_glyphs; marked_glyphs(size=1)": set(),
    "import atbook.lab.study": {"accelerate"},
}
SMALL = "--steps 3 --batch_size 8 --data_size 20 --save_every 1"
TEACHER = "teacher/teacher.safetensors"


def run(*command, cwd) -> str:
    """What a command prints, without a network or anything of this process's Python; it must end well."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["HF_HUB_OFFLINE"] = "1"
    limits = {"capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=environment, **limits)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel."""
    folder, name = made_once(tmp_path_factory, "wheel", build)
    return folder / name


def build(folder):
    """From a copy, since setuptools writes beside what it reads."""
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in COPIED_FILES:
        shutil.copy(ROOT / name, folder / name)
    # as pip asks for it, without pip, which takes seconds
    run(sys.executable, "-c", "from setuptools import build_meta as b; b.build_wheel('built')", cwd=folder)
    (built,) = (folder / "built").iterdir()
    return built.relative_to(folder)


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The `bin` of an environment that holds the wheel, and finds other packages where this process does."""
    return made_once(tmp_path_factory, "environment", lambda folder: install(wheel, folder))[0] / "bin"


def install(wheel, folder):
    venv.create(folder, with_pip=False)
    (own,) = (folder / "lib").glob("python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(own)  # which is what an installer does with a wheel of Python alone
    # Python does not follow .pth files in folders that are named in one, so an editable atlib there is out of
    # reach.
    others = [path for path in [*site.getsitepackages(), site.getusersitepackages()] if path in sys.path]
    (own / "others.pth").write_text("\n".join(others))


@pytest.fixture(scope="module")
def used(installed, tmp_path_factory):
    """By `tests/installed.py`: where it was found; what was imported after each step; of each part its
    folder, what it printed, its error."""
    return made_once(tmp_path_factory, "used", lambda folder: use(installed, folder))[1]


def use(installed, folder):
    parts = {name: folder / name for name in ("README", "run")}
    for part in parts.values():
        part.mkdir()
    (parts["README"] / "example.py").write_text(example_of_the_readme())
    teach = f"teacher find --out {TEACHER} --steps 3 --images 20"
    request = f"train --recipe find-distill --data atbook.worlds:marked_glyphs --teacher {TEACHER} {SMALL}"
    program = shutil.copy(ROOT / "tests" / "installed.py", folder)  # from where the clone is out of reach
    arguments = (json.dumps(x, default=str) for x in ([*STEPS], parts, teach.split(), request.split()))
    answer = json.loads(run(installed / "python", program, *arguments, cwd=folder).splitlines()[-1])
    of_parts = {name: (parts[name], *answer["parts"][name].values()) for name in parts}
    return answer["where"], answer["imported"], of_parts


def example_of_the_readme() -> str:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    for said, small in README_CHANGES:
        assert code.count(said) == 1, f"README's example has no {said} any more: adapt README_CHANGES"
        code = code.replace(said, small)
    return code + README_CHECKS


def test_the_wheel_holds_the_library_and_its_licence_and_nothing_else(wheel):
    files = {
        str(path.relative_to(ROOT))
        for package in ("atlib", "atfamily", "atrun", "atbook")
        for path in (ROOT / package).rglob("*")
        if path.is_file() and path.parent.name != "__pycache__"
    }
    about = f"{PROJECT['name'].replace('-', '_')}-{PROJECT['version']}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = HeaderParser().parsestr(archive.read(f"{about}/METADATA").decode())
    assert {name for name in names if not name.startswith(f"{about}/")} == files
    assert {name for name in names if "/licenses/" in name} == {f"{about}/licenses/LICENSE"}
    assert (metadata["Name"], metadata["Version"]) == (PROJECT["name"], PROJECT["version"])
    assert metadata["License-Expression"] == PROJECT["license"]


def test_it_is_found_where_it_was_installed(installed, used):
    origin, folder, version = used[0]
    assert Path(origin) == Path(folder, "atlib", "__init__.py") and version == PROJECT["version"]
    assert Path(folder).resolve().is_relative_to(installed.parent.resolve())


def test_heavy_libraries_wait_until_they_are_used(used):
    """`import atlib` is light: what takes seconds to import is imported where it is used."""
    for imported, allowed in zip(used[1], STEPS.values(), strict=True):
        assert {*imported} & HEAVY <= allowed


def test_the_commands_make_a_teacher_and_train_and_evaluate_a_student(used):
    folder, printed, error = used[2]["run"]
    assert error is None, error
    record = read_record(folder / "student" / "record.json")
    assert (record.about["atlib"], record.about["commit"]) == (PROJECT["version"], "unknown")
    assert "is finished" in printed
    assert f"accuracy {100 * record.results['test_accuracy']:.2f} %" in printed


def test_the_example_of_the_readme_runs(used):
    _, _, error = used[2]["README"]
    assert error is None, error
