"""Draw the book's drawings, book/assets/drawings/*.svg, anew: `make drawings`."""

from pathlib import Path

from atbook.drawing import drawings

FOLDER = Path(__file__).resolve().parent.parent / "book" / "assets" / "drawings"


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    drawn = dict(drawings())
    for file in FOLDER.glob("*.svg"):
        if file.name not in drawn:
            file.unlink()
    for name, text in drawn.items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    print(f"wrote {len(drawn)} drawings to {FOLDER}")


if __name__ == "__main__":
    main()
