"""Compile the explorer's C file to WebAssembly, as a script that a page opened from a folder can load."""

import base64
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "atbook" / "explorer" / "vit.c"
SCRIPT = ROOT / "atbook" / "explorer" / "vit-wasm.js"
# Sums may be made in another order, four numbers at a time; nothing else of a float's rules is given up.
FLAGS = (
    "--target=wasm32 -O3 -msimd128 -mnontrapping-fptoint -mbulk-memory -ffreestanding -fno-builtin -nostdlib"
    " -fno-math-errno -fno-trapping-math -fno-signed-zeros -fassociative-math -Wall -Wextra -Werror"
    " -Wl,--no-entry,--import-undefined,--strip-all"
).split()


def compiled() -> bytes:
    """The module that clang makes of `vit.c`. Raises `FileNotFoundError` where there is no clang, and
    `subprocess.CalledProcessError` for what it cannot compile."""
    with tempfile.TemporaryDirectory() as folder:
        module = Path(folder, "vit.wasm")
        subprocess.run(["clang", *FLAGS, "-o", str(module), str(SOURCE)], check=True)
        return module.read_bytes()


def as_script(module: bytes) -> str:
    """The module as text in a script: `Explorer.VIT_WASM`, in base64."""
    text = base64.b64encode(module).decode()
    return (
        "/* vit.c in WebAssembly, made by `make wasm`. */\n"
        f'globalThis.Explorer = Object.assign(globalThis.Explorer ?? {{}}, {{ VIT_WASM: "{text}" }});\n'
    )


def module_of(script: str) -> bytes:
    """The module in such a script."""
    return base64.b64decode(script.split('VIT_WASM: "')[1].split('"')[0])


if __name__ == "__main__":
    made = compiled()
    SCRIPT.write_text(as_script(made), encoding="utf-8")
    print(f"{SCRIPT.relative_to(ROOT)}: a module of {len(made):,} bytes")
