"""The seconds that `import atlib` adds to `import torch, timm`: `python benchmarks/import_time.py`. The limit
is 0.3 s (median)."""

import statistics
import subprocess
import sys
import time

ROUNDS = 7


def seconds(statement: str) -> float:
    """Wall-clock seconds of a fresh interpreter that runs one statement."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True)
    return time.perf_counter() - start


def main() -> None:
    seconds("import torch, timm, atlib")  # warm the disk cache
    pairs = [(seconds("import torch, timm"), seconds("import torch, timm, atlib")) for _ in range(ROUNDS)]
    added = [with_atlib - without for without, with_atlib in pairs]
    print(
        f"import torch, timm: {statistics.median(p[0] for p in pairs):.2f} s; atlib adds"
        f" {statistics.median(added):.3f} s (median of {ROUNDS}, {min(added):.3f} to {max(added):.3f})"
    )


if __name__ == "__main__":
    main()
