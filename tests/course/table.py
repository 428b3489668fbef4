"""`python -m tests.course.table`: a table of what each attack and each odd submission gets, with its remark
and its seconds, in Markdown."""

import time
from pathlib import Path
from tempfile import TemporaryDirectory

from atbook.cage import outside
from atbook.records import markdown_table
from tests.course.attacks import ATTACKS
from tests.course.helpers import edition_of, only, replace, solution
from tests.course.test_attacks import TASK
from tests.course.test_robustness import ODD, changed
from tools.grades import Result, graded


def row(name: str, result: Result, start: float) -> list[str]:
    """A line of the table."""
    says = [test.says for tests in result.tests.values() for test in tests if test.says]
    remark = [*result.remarks, *says][:1] or [""]
    seconds = f"{time.monotonic() - start:.1f}"
    return [name, f"{result.total:g}", remark[0].replace("|", "\\|")[:120], seconds]


def main() -> None:
    """Grade all of them, and print the table."""
    outside.SECONDS = 2.0
    rows = []
    with TemporaryDirectory() as folder:
        edition = edition_of(Path(folder), "a1", "a")
        with edition.cage() as cage:
            graded(solution(edition), edition, cage)  # so that no line holds the start of the cage
            for name, (slot, code) in ATTACKS.items():
                start = time.monotonic()
                handed = replace(solution(edition, "attacker"), slot, code)
                rows.append(row(name, graded(handed, only(edition, TASK[slot]), cage), start))
                print(rows[-1], flush=True)
            for name, (changes, first, _, _) in ODD.items():
                start = time.monotonic()
                rows.append(
                    row(f"odd: {name}", graded(changed(edition, changes, first), edition, cage), start)
                )
                print(rows[-1], flush=True)
    print(markdown_table(["what", "points", "first remark", "seconds on a clock"], *rows))


if __name__ == "__main__":
    main()
