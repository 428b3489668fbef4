"""Data that are made by a function of an installed package: `--data PACKAGE.MODULE:FUNCTION`."""

import re
import sys
from collections.abc import Callable
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name

OUR_OWN = Path(__file__).resolve().parents[2]  # where this project's packages lie, in a checkout too


def is_generated(data: str) -> bool:
    """Whether a data set is named as a function, such as `atbook.worlds:marked_glyphs`."""
    return re.fullmatch(r"\w+(\.\w+)*:\w+", data) is not None


def require_installed(data: str) -> None:
    """Raise `ValueError` for a function outside the installed packages, which may be a stranger's."""
    package = data.split(":")[0].split(".")[0]
    if is_generated(data) and not _is_installed(package):
        raise ValueError(f"{data!r} is of no installed package, and would run: --trust-data allows it")


def _is_installed(package: str) -> bool:
    of_project = package in ("atlib", "atbook")
    spec = find_spec(package) if of_project or package in packages_distributions() else None
    if spec is None:
        return False
    where = [Path(path).resolve() for path in (spec.submodule_search_locations or [spec.origin])]
    if of_project and where == [OUR_OWN / package]:
        return True
    working = [Path.cwd().resolve(), Path(sys.path[0] or ".").resolve()]  # `python -m` imports from there
    return all("site-packages" in path.parts or not any(map(path.is_relative_to, working)) for path in where)


def maker(data: str) -> Callable:
    """The function that a data set is named as, (split, size, seed) -> a data set as `atlib.data.Images` is
    one (size None: all images); its module is imported. Raises `ValueError` where there is none."""
    try:
        return resolve_name(data)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"data {data!r}, PACKAGE.MODULE:FUNCTION, are not there: {error}") from error
