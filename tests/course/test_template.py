"""The folder that a teacher makes a class's repository from names what exists, and may only read."""

import re
import tomllib
from importlib.util import find_spec

import yaml

from tests.helpers import ROOT

TEMPLATE = ROOT / "course" / "template"
WORKFLOW = (TEMPLATE / ".github" / "workflows" / "check.yml").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_workflow_may_read_and_nothing_else():
    workflow = yaml.safe_load(WORKFLOW)
    assert workflow["permissions"] == {"contents": "read"}
    assert all("permissions" not in job for job in workflow["jobs"].values())
    assert "secrets." not in WORKFLOW and "pull_request_target" not in WORKFLOW


def test_the_workflow_runs_the_public_checks_on_the_oldest_python():
    (job,) = yaml.safe_load(WORKFLOW)["jobs"].values()
    python = next(step["with"] for step in job["steps"] if "setup-python" in step.get("uses", ""))
    assert python == {"python-version": PROJECT["requires-python"].removeprefix(">=")}
    (command,) = re.findall(r"python -m (atbook \w+) \"\$notebook\"", WORKFLOW)
    assert command == "atbook exercises" and find_spec("atbook.exercises.commands")
