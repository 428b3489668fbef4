"""pyproject.toml, requirements.lock, environment.yml and the set-up tell one story."""

import re
import tomllib

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.helpers import ROOT
from tools import lock

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
LOCK = (ROOT / "requirements.lock").read_text(encoding="utf-8")
ENVIRONMENT = (ROOT / "environment.yml").read_text(encoding="utf-8")


def wanted() -> list[Requirement]:
    """Every range of pyproject.toml, the build's own and the extras included, but for one."""
    extras = lock.extras()
    assert {*PROJECT["project"]["optional-dependencies"]} - {*extras} == lock.LEFT_OUT == {"real"}
    lines = [*PROJECT["project"]["dependencies"], *(line for extra in extras.values() for line in extra)]
    return [Requirement(line) for line in lines + PROJECT["build-system"]["requires"]]


def locked(lines: list[str]) -> dict[str, list[Requirement]]:
    """Name to its pins: one, or several that markers keep apart."""
    pins = {}
    for requirement in map(Requirement, lines):
        pins.setdefault(canonicalize_name(requirement.name), []).append(requirement)
    return pins


def version(requirement: Requirement) -> Version:
    """The one version of a pin `name==version`."""
    (specifier,) = requirement.specifier
    assert specifier.operator == "==" and "*" not in specifier.version, requirement
    return Version(specifier.version)


def test_every_dependency_is_locked_within_its_range():
    pins = locked(lock.locked_lines(LOCK))
    for requirement in wanted():
        locked_pins = pins.get(canonicalize_name(requirement.name))
        assert locked_pins, f"{requirement.name} is not in requirements.lock: run `make lock`"
        for pin in locked_pins:
            inside = requirement.specifier.contains(version(pin), prereleases=True)
            assert inside, f"{pin} is outside {requirement}: run `make lock`"


def test_every_locked_file_has_its_sum_and_every_action_its_commit():
    pins = re.split(r"\n(?=\S)", LOCK.strip())
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}", pin) for pin in pins)
    for path in (ROOT / ".github" / "workflows").iterdir():
        used = re.findall(r"uses: (\S+)", path.read_text(encoding="utf-8"))
        assert all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action) for action in used), path


def test_conda_environment_has_the_same_versions():
    assert ENVIRONMENT == lock.environment(LOCK, lock.lower_bound()), "run `make lock`"


def test_it_is_flat_and_no_more_than_30_files():
    files = list((ROOT / "atlib").rglob("*.py"))
    assert {file.parent.name for file in files} == {"atlib"} and len(files) <= 30
