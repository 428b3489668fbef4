"""What is done with the library where it is installed, in one process because each start takes seconds:
python installed.py STEPS FOLDERS TEACH REQUEST, all JSON.

STEPS are imports and a call, which come first, as after them everything may be imported.

FOLDERS says where each part is done: `README` runs its example.py, `run` makes a teacher, trains what is
requested and evaluates it.
Prints, as JSON, where the library is, what was imported after each step, and of each part what it printed and
the error that ended it, if one did.
"""

import contextlib
import io
import json
import os
import runpy
import sys
import traceback
from functools import partial
from importlib import metadata, util


def run(teach: list[str], request: list[str]) -> None:
    from atbook.__main__ import main as book
    from atbook.worlds import glyphs
    from atrun.__main__ import main

    glyphs.SIZES |= {"validation": 30, "test": 40}  # in place of thousands

    def command(*words: str) -> None:
        assert main(list(words)) == 0, words

    assert book(teach) == 0
    command(*request, "--out", "student")
    command("resume", "student")
    command("evaluate", "student")


def main(steps: list[str], parts: dict[str, str], teach: list[str], request: list[str]) -> dict:
    imported = []
    for step in steps:
        exec(step, {})
        imported.append(sorted({name.partition(".")[0] for name in sys.modules}))
    found = metadata.distribution("attention-transfer")
    where = [util.find_spec("atlib").origin, str(found.locate_file("")), found.version]
    example = partial(runpy.run_path, "example.py", run_name="__main__")
    what, done = {"README": example, "run": partial(run, teach, request)}, {}
    for name, folder in parts.items():
        os.chdir(folder)
        error = None
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            try:
                what[name]()
            except BaseException:
                error = traceback.format_exc()
        done[name] = {"printed": printed.getvalue(), "error": error}
    return {"where": where, "imported": imported, "parts": done}


if __name__ == "__main__":
    print(json.dumps(main(*map(json.loads, sys.argv[1:]))))
