"""A seed for each student and task of an assignment, made of the two names."""

import hashlib


def plain_name(student: str) -> str:
    """A name as it is compared: one space between words, and nothing that cannot be seen."""
    words = " ".join(student.encode(errors="replace").decode().split())
    return "".join(letter for letter in words if letter.isprintable())


def own_seed(student: str, task: str) -> int:
    """A seed that is the same whenever the same student asks for the same task, and different for every
    other; capital letters and spaces do not count.

    Raises `ValueError` for a name that is not filled in.
    """
    if not isinstance(student, str) or not plain_name(student):
        raise ValueError(f"STUDENT is {student!r}: fill in your name or number in the cell that asks for it")
    return int(hashlib.sha256(f"{plain_name(student).lower()}/{task}".encode()).hexdigest()[:8], 16)
