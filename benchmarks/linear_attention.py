"""Linear attention beside softmax attention over the number of tokens: one layer, forward and backward.

    OMP_NUM_THREADS=1 python benchmarks/linear_attention.py [--repetitions 5] [--tokens 197 1024 4096]

Three ways: "fused", PyTorch's softmax attention, which stores no map; "dense", softmax with its map written
out; "linear", Hedgehog's features in linear time. With --device cuda on a GPU.
"""

import argparse

import torch
from memory import peak_allocated
from timing import interleave, ratio, spread
from torch.nn.functional import scaled_dot_product_attention

from atfamily.linear_attention import Hedgehog, linear_attention

TOKENS = (197, 577, 1024, 2048, 4096)


def make_actions(tokens: int, device: torch.device, heads: int = 3, width: int = 64) -> dict:
    """{name: a call that runs it forward and backward, and returns its output}, on the same q, k, v."""
    q, k, v = torch.randn(3, 1, heads, tokens, width, device=device).unbind(0)
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    of_q, of_k = (Hedgehog(heads, width).to(device) for _ in "qk")
    ways = {
        "fused": scaled_dot_product_attention,
        "dense": lambda q, k, v: (width**-0.5 * q @ k.mT).softmax(-1) @ v,
        "linear": lambda q, k, v: linear_attention(of_q(q), of_k(k), v),
    }

    def both_ways(way):
        def action():
            output = way(*inputs)
            output.square().sum().backward()
            for x in (*inputs, of_q.weight, of_k.weight):
                x.grad = None
            return output.detach()

        return action

    return {name: both_ways(way) for name, way in ways.items()}


def measure(tokens: int, device: torch.device, repetitions: int) -> dict:
    """{way: seconds and peak memory, "fused / linear" and "dense / linear": ratios within repetitions}."""
    actions = make_actions(tokens, device)
    for action in actions.values():
        action()  # warm-up
    rounds = interleave(actions, repetitions)
    memory = {name: {"peak_memory_mb": peak_allocated(actions[name], device) / 1e6} for name in actions}
    results = {name: spread(rounds, name) | memory[name] for name in actions}
    return results | {f"{name} / linear": ratio(rounds, name, "linear") for name in ("fused", "dense")}


def main() -> None:
    """Print a line for each number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    asked = parser.parse_args()
    print("    N | seconds fused dense linear | peak MB fused dense linear | fused / linear | dense / linear")
    for tokens in asked.tokens:
        figures = measure(tokens, asked.device, asked.repetitions)
        ways = [figures[name] for name in ("fused", "dense", "linear")]
        seconds = " ".join(f"{way['seconds']:.4f}" for way in ways)
        peaks = " ".join(f"{way['peak_memory_mb']:.1f}" for way in ways)
        ratios = (figures[f"{name} / linear"] for name in ("fused", "dense"))
        shown = " | ".join(
            f"{r['ratio']:.2f} ({r['ratio_low']:.2f} to {r['ratio_high']:.2f})" for r in ratios
        )
        print(f"{tokens:5} | {seconds} | {peaks} | {shown}", flush=True)


if __name__ == "__main__":
    main()
