"""`python -m tests.course.table`: what each attack gains without the cage and in it, and what odd submissions
get, with remarks and seconds, as a table in Markdown. `python -m tests.course.table 30` grades so many
submissions of A1 two at a time, and prints their seconds."""

import os
import socket
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from atbook.cage import outside
from atbook.records import markdown_table
from tests.course.attacks import ATTACKS, SECRETS, TAMED, aimed
from tests.course.helpers import edition_of, only, replace, solution
from tests.course.test_attacks import TASK
from tests.course.test_robustness import ODD, REFUSED, changed
from tests.course.unguarded import Outcome, gained, outcome
from tools.grades import Result, grade, graded
from tools.handed import handed_in


def row(name: str, without: str, inside: str, result: Result, start: float) -> list[str]:
    """A line of the table."""
    says = [test.says for tests in result.tests.values() for test in tests if test.says]
    remark = ([*result.remarks, *says] or [""])[0]
    seconds = f"{time.monotonic() - start:.1f}"
    return [name, without, inside, remark.replace("|", "\\|")[:120], seconds]


def seconds(number: int) -> str:
    """How long a cage takes to start, and so many submissions to be graded, two at a time."""
    with TemporaryDirectory() as folder:
        edition, start = edition_of(Path(folder), "a1", "a"), time.monotonic()
        with edition.cage() as cage:
            cage.call("def f():\n    pass\n", "f", [])
        started, begun = time.monotonic() - start, time.monotonic()
        results = grade(edition, [solution(edition, f"student {at}") for at in range(number)], jobs=2)
    took, right = time.monotonic() - begun, [result.points("q1") + result.points("q2") for result in results]
    return (
        f"a cage starts in {started:.1f} s; {number} submissions: {took:.0f} s; 11 points each: {set(right)}"
    )


def main() -> None:
    """Grade all of them, and print the table."""
    outside.SECONDS = 2.0
    os.environ["TOKEN"] = "SECRET_OF_THE_TEACHER"
    rows = []
    with TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as server:
        edition, port, file = (
            edition_of(Path(folder), "a1", "a"),
            server.getsockname()[1],
            Path(folder) / "mine",
        )
        secrets = (*SECRETS, edition.key)

        def attack(name: str, tamed: bool):
            slot, code = ATTACKS[name]
            for wild, tame in TAMED.items() if tamed else ():
                code = code.replace(wild, tame)
            file.write_bytes(b"mine")
            return replace(solution(edition, "attacker"), slot, aimed(code, edition.folder, file, port))

        with edition.cage() as cage:
            graded(solution(edition), edition, cage)  # so that no line holds the start of the cage
            for name, (slot, _) in ATTACKS.items():
                task = only(edition, TASK[slot])
                without = gained(outcome(task, attack(name, tamed=True)), file, secrets) or "nothing"
                handed, start = attack(name, tamed=False), time.monotonic()
                result = graded(handed, task, cage)
                says = " ".join([*result.remarks, *(t.says for ts in result.tests.values() for t in ts)])
                inside = gained(Outcome(result.total, says, False), file, secrets) or "nothing"
                rows.append(row(name, without, inside, result, start))
            for name, (changes, first, _, _) in ODD.items():
                start = time.monotonic()
                result = graded(changed(edition, changes, first), edition, cage)
                rows.append(row(f"odd: {name}", "", f"{result.total:g} of 15", result, start))
            handed_folder = Path(folder) / "handed"
            handed_folder.mkdir()
            for name, (content, _) in REFUSED.items():
                path = handed_folder / name
                content(path) if callable(content) else path.write_bytes(content)
            for handed in handed_in(handed_folder, []):
                start = time.monotonic()
                result = graded(handed, edition, cage)
                rows.append(row(f"file: {handed.file}", "", result.status, result, start))
    print(markdown_table(["what", "gains without the cage", "in it", "first remark", "seconds"], *rows))


if __name__ == "__main__":
    print(seconds(int(sys.argv[1]))) if sys.argv[1:] else main()
