"""The plan for a teacher and a student of which nothing is said but what they are."""

from torch import nn

from atlib.compatibility import Sizes, sizes_of
from atlib.plan import Plan


def derive_plan(teacher: nn.Module, student: nn.Module, how: str = "distill") -> Plan:
    """The plan that `train` derives for a teacher and a student of any depths, heads and patches."""
    return plan_of_sizes(sizes_of(teacher), sizes_of(student), how)[0]


def plan_of_sizes(teacher: Sizes, student: Sizes, how: str) -> tuple[Plan, dict[str, str]]:
    """The plan for a teacher and a student of these sizes, and for each choice that was derived its rule.

    To copy, all layers take part, and to distill, the first three quarters, as 18 of 24 in arXiv 2411.09702.
    With other depths the student's last layer has the teacher's last, and the others lie evenly below. Heads
    of another number are aggregated (AttnDistill, arXiv 2210.00944), patches resampled.
    """
    count = student.depth if how == "copy" else max(1, round(0.75 * student.depth))
    why = "all layers" if how == "copy" else "the first three quarters, as the paper's 18 of 24"
    layers: dict[int, int] | range | None = range(count) if count < student.depth else None
    printed = "null" if layers is None else [*layers]
    if teacher.depth != student.depth:
        printed = layers = {i: -(-(i + 1) * teacher.depth // student.depth) - 1 for i in range(count)}
        why += f"; the teacher's {teacher.depth} layers lie evenly on the student's {student.depth}"
    rules, unequal = {"layers": f"{printed}: {why}"}, {}
    if teacher.heads != student.heads:
        unequal["unequal_heads"] = "aggregate"
        heads = f"{teacher.heads} heads for {student.heads}"
        rules["unequal_heads"] = f"aggregate: {heads} (AttnDistill, 2210.00944)"
    if teacher.grid != student.grid:
        unequal["unequal_grid"] = "resample"
        rules["unequal_grid"] = f"resample: {teacher.grid} patches for {student.grid}"
    return Plan(how=how, layers=layers, **unequal), rules
