"""Images a second of classifiers of one size, as ratios to a plain ViT's: `python benchmarks/throughput.py
[--model tiny] [--help]`.

A forward pass in eval mode, from a batch of images to logits, of each of the `NETWORKS`: the systems of the
book's cards, a student of Copy with its teacher, and one of Distill, which has none any more. All have the
width, depth, heads and patches of one ViT, and first weights: time depends on shapes alone. Every repetition
runs each network in turn; ratios are taken within a repetition, the table shows their median and range. A
second is one of a processor core's own time, on one thread: other programs on the machine do not add to it.
Beside the speed stand the weights that are held, and the FLOPs of matrix products and convolutions. The bits
of BinaryViT are computed as floats here, as in its published code, so that nothing is seen of what operations
on bits would gain. Prints the table and writes it to results/benchmarks.jsonl.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from flops import counter
from recording import leave, require_positive
from timing import interleave, ratio, spread
from timm.models.cait import Cait
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from atfamily.binary_vit import binary_deit
from atfamily.cait import CaitTransfer
from atfamily.depth import published_start
from atfamily.locality import localise_attention, shift_patches
from atfamily.patch_conv import PatchConvNet
from atfamily.resmlp import resmlp
from atlib import AttentionTransfer, Plan, create_vit
from atlib.pair import Pair, student_of

# The ViT that all are as large as: that of the built-in worlds, or DeiT's smaller ones.
MODELS = {"glyphs": "glyphs", "tiny": "vit_tiny_patch16_224", "small": "vit_small_patch16_224"}
PLAIN = "vit"  # what the others are compared with
THREADS = 1


class Sizes(NamedTuple):
    """What all networks have in common, in a ViT's words."""

    img_size: int
    patch_size: int
    embed_dim: int
    depth: int
    num_heads: int
    num_classes: int

    @classmethod
    def of(cls, vit: VisionTransformer) -> "Sizes":
        """Read off a ViT."""
        embed, heads = vit.patch_embed, vit.blocks[0].attn.num_heads
        return cls(
            embed.img_size[0], embed.patch_size[0], vit.embed_dim, len(vit.blocks), heads, vit.num_classes
        )

    def vit(self) -> VisionTransformer:
        """A plain ViT."""
        return create_vit(self._asdict())


class Network(NamedTuple):
    """What is measured: its name in the table, and how it is made."""

    title: str
    build: Callable[[Sizes], nn.Module]


def _copy(sizes: Sizes) -> nn.Module:
    return AttentionTransfer(sizes.vit(), sizes.vit(), Plan())


def _distilled(sizes: Sizes) -> nn.Module:
    """What is left of Distill after training."""
    return student_of(AttentionTransfer(sizes.vit(), sizes.vit(), Plan(how="distill")))


def _cait(sizes: Sizes) -> Cait:
    """Two layers of class attention come on top, as in all of its published sizes."""
    return Cait(**sizes._asdict(), init_values=published_start(sizes.depth))


def _cait_copy(sizes: Sizes) -> nn.Module:
    return CaitTransfer(sizes.vit(), _cait(sizes), class_rows="copy")


def _resmlp(sizes: Sizes) -> nn.Module:
    return resmlp(sizes.img_size, sizes.patch_size, sizes.embed_dim, sizes.depth, sizes.num_classes)


def _patch_conv(sizes: Sizes) -> nn.Module:
    return PatchConvNet(sizes.num_classes, sizes.embed_dim, sizes.depth, sizes.patch_size, init_values=0.1)


def _local(sizes: Sizes) -> nn.Module:
    return localise_attention(shift_patches(sizes.vit()))


def _binary(sizes: Sizes) -> nn.Module:
    """As the study of binary students has it: with a class token, and without pooling branches."""
    shape = sizes.img_size, sizes.patch_size, sizes.num_classes, sizes.embed_dim, sizes.depth, sizes.num_heads
    return binary_deit(*shape, class_token=True, branches=())


NETWORKS = {
    PLAIN: Network("ViT", Sizes.vit),
    "distill": Network("Distill: the student alone", _distilled),
    "copy": Network("Copy: student and teacher", _copy),
    "cait": Network("CaiT", _cait),
    "cait-copy": Network("CaiT with copied class rows, and teacher", _cait_copy),
    "resmlp": Network("ResMLP", _resmlp),
    "patch-conv": Network("PatchConvNet", _patch_conv),
    "local": Network("ViT with SPT and LSA", _local),
    "binary": Network("binary ViT, bits as floats", _binary),
}


def main(arguments: list[str] | None = None) -> dict:
    """Measure, print, write; returns the record's results."""
    options = parse(arguments)
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    start = time.perf_counter()
    sizes = Sizes.of(create_vit(MODELS[options.model]))
    images = torch.randn(options.batch, 3, sizes.img_size, sizes.img_size)
    models = {name: network.build(sizes).eval().requires_grad_(False) for name, network in NETWORKS.items()}
    with torch.no_grad():  # as `atlib.evaluate.predict` runs them
        counted = {name: flops_of(model, images) / options.batch for name, model in models.items()}
        actions = {
            name: lambda model=model: [model(images) for _ in range(options.passes)]
            for name, model in models.items()
        }
        interleave(actions, 1)  # warm-up
        rounds = interleave(actions, options.repetitions, time.process_time)
    results = {
        name: {
            "title": NETWORKS[name].title,
            **spread(rounds, name),
            "images_per_second": options.batch * options.passes / spread(rounds, name)["seconds"],
            **ratio(rounds, PLAIN, name),
            "weights": weights_of(model),
            "flops_per_image": counted[name],
            "flops_ratio": counted[name] / counted[PLAIN],
        }
        for name, model in models.items()
    }
    print(table(options, results))
    config = vars(options) | {"threads": THREADS}
    leave(name_of(options), config, {"networks": results}, rounds, start, options.out)
    return results


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="glyphs", help="the ViT that all are as large as")
    parser.add_argument("--batch", type=int, default=128, help="images of a forward pass")
    parser.add_argument("--passes", type=int, default=5, help="forward passes that are timed together")
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument(
        "--out", type=Path, help="file that the record is added to (default: results/benchmarks.jsonl)"
    )
    options = parser.parse_args(arguments)
    require_positive(parser, options, "batch", "passes", "repetitions")
    return options


def flops_of(model: nn.Module, images: Tensor) -> int:
    """FLOPs of the matrix products and convolutions of one forward pass, as PyTorch counts them."""
    with counter() as counted:
        model(images)
    return counted.get_total_flops()


def weights_of(model: nn.Module) -> int:
    """How many weights a model holds to classify an image: a pair holds its teacher's too."""
    parts = [model, *model.teachers] if isinstance(model, Pair) else [model]
    return sum(weight.numel() for part in parts for weight in part.parameters())


def name_of(options: argparse.Namespace) -> str:
    """throughput-MODEL-cpu, which tells its record from those of other sizes."""
    return f"throughput-{options.model}-cpu"


def table(options: argparse.Namespace, results: dict) -> str:
    """All networks, one in each line; every x is a ratio to the plain ViT."""
    lines = [
        (
            f"One forward pass: the sizes of {MODELS[options.model]}, batch {options.batch},"
            f" {THREADS} thread, {options.repetitions} repetitions, torch {torch.__version__}"
        ),
        (f"{'':42} {'images/s':>9} {'x':>6} {'(range)':>14} {'weights':>11} {'MFLOP':>9} {'x':>6}"),
    ]
    for row in results.values():
        lines.append(
            f"{row['title']:42} {row['images_per_second']:9.1f} {row['ratio']:6.3f}"
            f" ({row['ratio_low']:.2f} to {row['ratio_high']:.2f}) {row['weights']:11,}"
            f" {row['flops_per_image'] / 1e6:9.1f} {row['flops_ratio']:6.3f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
