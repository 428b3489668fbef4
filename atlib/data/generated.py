"""Data that are made by a function of an installed package: `--data PACKAGE.MODULE:FUNCTION`."""

import re
from collections.abc import Callable
from importlib import import_module


def is_generated(data: str) -> bool:
    """Whether a data set is named as a function, such as `atbook.worlds:marked_glyphs`."""
    return re.fullmatch(r"\w+(\.\w+)*:\w+", data) is not None


def maker(data: str) -> Callable:
    """The function that a data set is named as: (split, size, seed) -> a data set as `atlib.data.Images` is
    one; size: the number of images, None for as many as the split has.

    The module is imported, so name only what you trust. Raises `ValueError` where there is no such module or
    function.
    """
    module, name = data.split(":")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"data {data!r} name a function of an installed package, as PACKAGE.MODULE:FUNCTION, and there is"
            f" none ({error}): install the package, or correct the name"
        ) from error
