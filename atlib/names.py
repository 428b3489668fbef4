"""One way to say that a name is unknown."""

import difflib
from collections.abc import Iterable


def require_known(kind: str, name: object, known: Iterable[str]) -> None:
    """Raise `ValueError` unless `name` is one of `known`: it names `name`, the close ones, and all that there are."""
    known = list(known)
    if name in known:
        return
    close = difflib.get_close_matches(str(name), known)
    hint = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
    raise ValueError(f"unknown {kind} {name!r}.{hint} Known: {', '.join(map(repr, known))}.")
