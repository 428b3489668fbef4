"""Draw anew those of book/assets/drawings/*.svg that show records and models: `make drawings`."""

from pathlib import Path

from atbook.drawing import drawings

FOLDER = Path(__file__).resolve().parent.parent / "book" / "assets" / "drawings"


def main() -> None:
    for name, text in drawings():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
