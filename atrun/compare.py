"""`python -m atlib compare RUN RUN`: two runs on the same test images, image by image."""

import argparse
import warnings
from pathlib import Path
from typing import NamedTuple

import torch
from scipy.stats import binomtest
from torch import Tensor

from atfamily.measures.predictions import Interval, paired_bootstrap
from atlib.evaluate import predict, score
from atrun.build import held_out
from atrun.classes import require_classes
from atrun.config import TRUST_DATA, read_config
from atrun.measure import readable, same_images, tested_anew
from atrun.runner import device, load_result, weights_of


class Comparison(NamedTuple):
    """Two models on the same images: the shares that each has right; first less second, with its 95 %
    interval over other images; images that only one has right; p of McNemar's exact test."""

    first: float
    second: float
    difference: Interval
    only_first: int
    only_second: int
    p: float


def compared(first: Tensor, second: Tensor, labels: Tensor) -> Comparison:
    """Compare the logits (n, classes) of two models for the same images, with labels (n,): McNemar's test
    (1947), in its exact, binomial form, and `paired_bootstrap` over images, not over training seeds."""
    accuracies = [score(logits, labels).accuracy for logits in (first, second)]
    a, b = (logits.argmax(1) == labels for logits in (first, second))
    only = int((a & ~b).sum()), int((~a & b).sum())
    p = float(binomtest(only[0], sum(only)).pvalue) if sum(only) else 1.0
    return Comparison(*accuracies, paired_bootstrap(a, b), *only, p)


def compare_runs(
    first: Path, second: Path, split: str | None = None, averaged: bool = False, trust_data: bool = False
) -> Comparison:
    """Compare what two finished runs have made, on images that both are evaluated on, as each sees them."""
    configs = [read_config(folder, trust_data) for folder in (first, second)]
    for folder, config in zip((first, second), configs):
        if not config.classifies:
            raise ValueError(f"{folder} trains no classifier, but by {config.method} on {config.data}")
    weights = [weights_of(folder, averaged) for folder in (first, second)]
    sets = [held_out(config, split) for config in configs]
    if not same_images(*sets):
        raise ValueError(f"{first} and {second} are evaluated on different images: name one --split")
    if tuple(sets[0].classes) != tuple(sets[1].classes) or not torch.equal(sets[0].targets, sets[1].targets):
        raise ValueError(f"the runs read different labels from {configs[0].data}: look at --label_column")
    for path, config, images in zip(weights, configs, sets):
        require_classes(path, images)
        if anew := tested_anew(path, config, split or config.evaluation_split, images):
            warnings.warn(anew.strip(), stacklevel=2)
    logits = [predict(load_result(path).to(device()), images) for path, images in zip(weights, sets)]
    return compared(*logits, sets[0].targets[readable(sets[0])])


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    parser.add_argument("first", type=Path, metavar="RUN")
    parser.add_argument("second", type=Path, metavar="RUN")
    parser.add_argument("--split", help="default: the one that the runs evaluate on")
    parser.add_argument("--averaged", action="store_true", help="the averaged weights of both")
    parser.add_argument("--trust-data", action="store_true", help=TRUST_DATA)
    parser.set_defaults(run=compare_command)


def compare_command(arguments: argparse.Namespace) -> int:
    first, second, difference, only_first, only_second, p = compare_runs(
        arguments.first, arguments.second, arguments.split, arguments.averaged, arguments.trust_data
    )
    mean, low, high = (100 * points for points in difference)
    print(f"{arguments.first}: accuracy {100 * first:.2f} %")
    print(f"{arguments.second}: accuracy {100 * second:.2f} %")
    print(f"difference {mean:+.2f} points, 95 % interval {low:+.2f} to {high:+.2f}")
    only = f"only the first is right for {only_first} images, only the second for {only_second}"
    print(f"{only}: McNemar's exact p = {p:.2g}")
    return 0
