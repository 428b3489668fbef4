"""The ranges of a world's settings."""

from numbers import Integral


def require_ranges(of: object, ranges: dict[str, tuple], whole: dict[str, tuple]) -> None:
    """Raise `ValueError` for a field outside its range, (low, high), ends included, and for one of
    `whole` that is no whole number."""
    kind = type(of).__name__
    for name, (low, high) in (ranges | whole).items():
        value = getattr(of, name)
        if not low <= value <= high:
            raise ValueError(f"{kind}({name}={value!r}) is out of range: {name} goes from {low} to {high}")
        if name in whole and not isinstance(value, Integral):
            raise ValueError(f"{kind}({name}={value!r}): {name} is a whole number")
