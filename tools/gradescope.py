"""Gradescope's side of the grader: `python -m tools.gradescope` grades one submission, and writes what
Gradescope shows. It is the same driver as `python -m tools.course grade`."""

import json
from pathlib import Path

from atbook.cage.outside import missing
from tools.grades import Edition, Result, grade
from tools.handed import handed_in

AUTOGRADER = Path("/autograder")


def results_of(result: Result, remarks: list[str]) -> dict:
    """A result in the words of Gradescope's results.json."""
    tests = [
        {"name": f"{task}: {test.title}", "score": test.points, "max_score": test.of, "output": test.says}
        for task, of_task in result.tests.items()
        for test in of_task
    ]
    says = "\n".join([*result.remarks, *remarks])
    return {"score": result.total, "output": says, "visibility": "visible", "tests": tests}


def main(folder: Path = AUTOGRADER) -> None:
    """Grade what is in the folder that Gradescope prepares."""
    edition = Edition(folder / "source" / "edition")
    everybody = handed_in(folder / "submission", edition.uploads)
    remarks = [lacks] if (lacks := missing()) else []
    if len(everybody) != 1:
        result = Result("", "", "refused", {}, [f"{len(everybody)} submissions were found, not one"], 0.0)
    else:
        (result,) = grade(edition, everybody)
        path = folder / "submission_metadata.json"
        users = json.loads(path.read_text(encoding="utf-8")).get("users", []) if path.is_file() else []
        known = {str(user.get(part)).lower() for user in users for part in ("email", "name", "sid")}
        typed = everybody[0].reading.name.value or ""
        if known and typed.lower() not in known:
            remarks.append(f"STUDENT is {typed!r}, and another name handed this in")
    out = folder / "results"
    out.mkdir(exist_ok=True)
    (out / "results.json").write_text(json.dumps(results_of(result, remarks), indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
