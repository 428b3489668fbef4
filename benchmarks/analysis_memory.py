"""Peak resident memory of the streamed analyses over 10,000 images, each in a fresh process: `python
benchmarks/analysis_memory.py`. The limit is 2 GB.

Two "glyphs" ViTs with random weights are walked over generated images, and two ViT-S/16 (N = 197, H = 6, D =
384, L = 12) over images of 224 pixels; some activations of that size are random numbers, which cost a process
as much as real ones. The case "nothing" is a process that only imports what the others import.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from atbook.records import add_record, records_file
from atbook.worlds import marked_glyphs
from atfamily.measures.cka import MinibatchCKA, StreamingCKA, class_token, every_token, layer_cka, linear_cka
from atlib import create_vit
from atlib.analysis import StreamingDivergence, compare_layers, describe_layers
from atlib.data import Images
from atrun.record import Record, about, peak_memory_mb

LIMIT_MB = 2000
L, N, H, D = 12, 197, 6, 384  # ViT-S/16 at 224 pixels


def glyphs(images: int) -> tuple:
    torch.manual_seed(0)
    return create_vit("glyphs"), create_vit("glyphs"), marked_glyphs(size=images)


def photographs(images: int) -> tuple:
    """Two ViT-S/16 and `images` images of noise."""
    torch.manual_seed(0)
    pixels = torch.randint(0, 256, (max(2, images), 3, 224, 224), dtype=torch.uint8)
    return (
        create_vit("vit_small_patch16_224"),
        create_vit("vit_small_patch16_224"),
        Images(pixels, torch.arange(len(pixels)) % 2, ("a", "b")),
    )


def layers(images: int, batch: int, width: int) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Batches of the features of L layers of two models, one row of `width` numbers for each image."""
    for start in range(0, images, batch):
        yield tuple([torch.randn(min(batch, images - start), width) for _ in range(L)] for _ in range(2))


def gather(
    accumulator: StreamingCKA | MinibatchCKA, batches: Iterator[tuple[list[Tensor], list[Tensor]]]
) -> None:
    for xs, ys in batches:
        accumulator.update_layers(xs, ys)
    accumulator.matrix()


def maps_of_vit_small(images: int, batch: int = 50) -> None:
    divergence = StreamingDivergence()
    for _ in range(max(1, images // batch)):
        divergence.update(*(torch.randn(batch, H, N, N).softmax(-1) for _ in range(2)))
    divergence.value("bipartite")


# The cases that are measured: {name: a function of the number of images}.
CASES = {
    "nothing": lambda images: None,
    "layer_cka, glyphs, class token": lambda images: layer_cka(*glyphs(images), class_token),
    "layer_cka, glyphs, every token": lambda images: layer_cka(*glyphs(images), every_token),
    "layer_cka with MinibatchCKA, glyphs, every token": lambda images: layer_cka(
        *glyphs(images), every_token, accumulator=MinibatchCKA()
    ),
    "layer_divergence, glyphs": lambda images: [
        divergence.value("bipartite") for divergence in compare_layers(*glyphs(images))
    ],
    # A hundredth of the images, as below.
    "layer_cka, ViT-S/16, class token, a hundredth of the images": lambda images: layer_cka(
        *photographs(images // 100), class_token
    ),
    "layer_divergence, ViT-S/16, a hundredth of the images": lambda images: compare_layers(
        *photographs(images // 100)
    ),
    "describe_layers, ViT-S/16, a hundredth of the images": lambda images: describe_layers(
        *photographs(images // 100)[1:]
    ),
    "linear_cka, D = 384, one pair of layers": lambda images: linear_cka(
        torch.randn(images, D), torch.randn(images, D)
    ),
    "StreamingCKA, D = 384, 12 x 12 layers": lambda images: gather(StreamingCKA(), layers(images, 500, D)),
    "MinibatchCKA, D = 384, 12 x 12 layers": lambda images: gather(MinibatchCKA(), layers(images, 500, D)),
    # A tenth of the images: the peak is reached in the first batches, the rest only takes time.
    "MinibatchCKA, N·D = 75,648, 12 x 12 layers, a tenth of the images": lambda images: gather(
        MinibatchCKA(), layers(images // 10, 50, N * D)
    ),
    "StreamingDivergence, N = 197, H = 6, a fiftieth of the images": lambda images: maps_of_vit_small(
        images // 50
    ),
}


def measure(images: int) -> list[dict]:
    """Peak MB and seconds of every case; each runs in a process of its own."""
    measured = []
    for name in CASES:
        done = subprocess.run(
            [sys.executable, __file__, "--images", str(images), "--case", name],
            capture_output=True,
            text=True,
            check=True,
        )
        measured.append({"case": name, **json.loads(done.stdout.splitlines()[-1])})
        print(
            f"{measured[-1]['peak_memory_mb']:7.0f} MB {measured[-1]['seconds']:7.1f} s   {name}", flush=True
        )
    return measured


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument(
        "--case", choices=CASES, help="measure this one only, in this process, and print it as JSON"
    )
    parser.add_argument(
        "--out", type=Path, help="file that the record is added to (default: results/benchmarks.jsonl)"
    )
    options = parser.parse_args(arguments)
    start = time.perf_counter()
    if options.case:
        CASES[options.case](options.images)
        print(json.dumps({"peak_memory_mb": peak_memory_mb(), "seconds": time.perf_counter() - start}))
        return
    measured = measure(options.images)
    most = max(case["peak_memory_mb"] for case in measured)
    print(f"at most {most:.0f} MB; the limit of {LIMIT_MB} MB is {'kept' if most < LIMIT_MB else 'EXCEEDED'}")
    results = {
        "peak_memory_mb": {case["case"]: case["peak_memory_mb"] for case in measured},
        "limit_mb": LIMIT_MB,
        "kept": most < LIMIT_MB,
    }
    config = {"images": options.images, "L": L, "N": N, "H": H, "D": D}
    record = Record(
        "benchmarks",
        "analysis_memory",
        0,
        config,
        results,
        measured,
        time.perf_counter() - start,
        most,
        about(),
    )
    print(f"wrote {add_record(options.out or records_file('benchmarks', None), record)}")


if __name__ == "__main__":
    main()
