"""What is said of values that are not as they must be."""

from collections.abc import Callable, Iterable
from typing import Any


def check_fields(value: object, rules: Iterable[tuple[Iterable[str], Callable[[Any], bool], str]]) -> None:
    """Raise `ValueError` naming the first field of `value` that is not as it must be; rules: (names of
    fields, whether a value fits, what is said of one that does not)."""
    for names, fits, says in rules:
        for name in names:
            if not fits(field := getattr(value, name)):
                raise ValueError(f"{type(value).__name__}({name}={field!r}): {name} {says}")
