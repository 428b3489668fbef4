"""Set the repository's address everywhere: `make repository URL=https://github.com/OWNER/NAME`.

The one source is `[project.urls] Repository` in pyproject.toml. What stands there now is looked for in all
text files, in every form the address takes, and replaced; the Colab buttons of the .ipynb are then written
anew from the source by tools/notebooks.py.
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FORM = re.compile(
    r"https://github\.com/(?P<owner>[A-Za-z0-9](?:[A-Za-z0-9-]{0,37}[A-Za-z0-9])?)/(?P<name>[\w.-]{1,100})",
    re.ASCII,
)
SUFFIXES = {".md", ".py", ".toml", ".yml", ".yaml", ".cff", ".ipynb", ".html", ".css", ".bib", ".txt"}
# Not to be changed: other people's files, what is built, records of runs, which say where they were made, and
# tests, which read the address from its source and make up others.
LEFT_ALONE = {
    ".git",
    "_build",
    "build",
    "mathjax",
    "results",
    "tests",
    "__pycache__",
    ".pytest_cache",
    ".hypothesis",
}


def parsed(url: str) -> tuple[str, str]:
    """Owner and name in an address such as https://github.com/OWNER/NAME. Raises ValueError otherwise."""
    match = FORM.fullmatch(url.strip().removesuffix("/").removesuffix(".git"))
    if not match or match["name"] in {".", ".."}:
        raise ValueError(f"{url!r} is not of the form https://github.com/OWNER/NAME")
    return match["owner"], match["name"]


def current(root: Path = ROOT) -> str:
    """The address as pyproject.toml has it."""
    return tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"][
        "Repository"
    ]


def rewritten(text: str, old: str, new: str) -> str:
    """`text` with the address `old` changed to `new` in all its forms: the repository, Colab, Pages, raw,
    Binder."""
    (owner, name), (new_owner, new_name) = parsed(old), parsed(new)
    before = (
        r"(?P<before>github\.com/|colab\.research\.google\.com/github/|raw\.githubusercontent\.com/|/v2/gh/)"
    )
    # A longer name that only starts like ours is another repository; ".git" and a full stop end ours.
    after = r"(?=\.git\b|(?!\.?[\w-]))"
    text = re.sub(
        f"{before}{re.escape(owner)}/{re.escape(name)}{after}", rf"\g<before>{new_owner}/{new_name}", text
    )
    pages = rf"(?<![\w.-]){re.escape(owner)}\.github\.io/{re.escape(name)}{after}"
    text = re.sub(pages, f"{new_owner}.github.io/{new_name}", text)
    # The folder that a clone makes, in instructions: `cd NAME`, `./NAME`.
    return re.sub(rf"(?P<before>\bcd |\./){re.escape(name)}{after}", rf"\g<before>{new_name}", text)


def text_files(root: Path) -> list[Path]:
    """The text files of the project, in a fixed order."""
    found = []
    for path in sorted(root.iterdir()):
        if path.is_dir():
            # A virtual environment has this file at its top, whatever its name.
            if path.name not in LEFT_ALONE and not (path / "pyvenv.cfg").exists() and not path.is_symlink():
                found += text_files(path)
        elif path.suffix in SUFFIXES or path.name in {"Makefile", "run"}:
            found.append(path)
    return found


def set_everywhere(root: Path, url: str) -> list[Path]:
    """Change the address below `root` to `url`; the files that changed. A second time changes nothing."""
    old, new = current(root), "https://github.com/" + "/".join(parsed(url))
    changed = []
    for path in text_files(root):
        text = path.read_text(encoding="utf-8")
        result = rewritten(text, old, new)
        if result != text:
            path.write_text(result, encoding="utf-8")
            changed.append(path)
    return changed


def main() -> None:
    if len(sys.argv) != 2 or not sys.argv[1]:
        sys.exit(
            f"The address is {current()}\nTo change it: make repository URL=https://github.com/OWNER/NAME"
        )
    try:
        changed = set_everywhere(ROOT, sys.argv[1])
    except ValueError as error:
        sys.exit(f"make repository: {error}; nothing was changed.")
    for path in changed:
        print(f"rewrote {path.relative_to(ROOT)}")
    print(f"The repository's address is {current()}")


if __name__ == "__main__":
    main()
