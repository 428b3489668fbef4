"""Weights from elsewhere: read them, build the teacher that they belong to, say what it is."""

from atrun.teachers.load import is_file, load_teacher, report

__all__ = ["is_file", "load_teacher", "report"]
