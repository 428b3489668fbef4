"""The loss of one layer alone, forward and backward: the map-free one of atlib against the dense one, at N =
197 and N = 785."""

import torch
from dense_baseline import cross_entropy_of_maps
from memory import peak_allocated
from timing import interleave, ratio, spread

from atlib.attention import Seen
from atlib.losses import attention_cross_entropy

TOKENS = (197, 785)
LOSSES = ("map-free", "dense")


def measure(
    batch: int, heads: int, width: int, device: torch.device, dtype: torch.dtype, repetitions: int
) -> dict:
    """{"map-free" and "dense": {"197" and "785": seconds, peak memory}, "growth": of the peak from 197 to 785
    tokens, "speed": dense / ours}.

    The peak is that of a forward and backward pass above its inputs q, k of both models, (batch, heads, N,
    width) each; the gradients with respect to q and k are part of it.
    """
    results = {loss: {} for loss in LOSSES} | {
        "growth": {},
        "speed": {},
        "batch": batch,
        "heads": heads,
        "head_width": width,
    }
    for tokens in TOKENS:
        actions = make_actions(batch, heads, tokens, width, device, dtype)
        for action in actions.values():
            action()  # warm-up
        rounds = interleave(actions, repetitions)
        for loss in LOSSES:
            results[loss][str(tokens)] = spread(rounds, loss) | {
                "peak_memory_mb": peak_allocated(actions[loss], device) / 1e6
            }
        results["speed"][str(tokens)] = ratio(rounds, "dense", "map-free")
    for loss in LOSSES:
        small, large = (results[loss][str(tokens)]["peak_memory_mb"] for tokens in TOKENS)
        results["growth"][loss] = large / small
    return results


def make_actions(
    batch: int, heads: int, tokens: int, width: int, device: torch.device, dtype: torch.dtype
) -> dict:
    """{loss: a call that runs it forward and backward and returns its value}, on the same random q and k."""
    q, k, q_t, k_t = torch.randn(4, batch, heads, tokens, width, device=device, dtype=dtype).unbind(0)
    q, k, q_t, k_t = (tensor.clone() for tensor in (q, k, q_t, k_t))  # each has its own memory
    q.requires_grad_(), k.requires_grad_()
    scale = width**-0.5

    def map_free():
        return attention_cross_entropy([Seen(q, k, None, scale)], [Seen(q_t, k_t, None, scale)])

    def dense():
        with torch.no_grad():
            target = (scale * q_t.float() @ k_t.float().mT).softmax(-1)
        return cross_entropy_of_maps(scale * q.float() @ k.float().mT, target)

    def both_ways(loss):
        def action():
            value = loss()
            value.backward()
            q.grad = k.grad = None
            return value.item()

        return action

    return {"map-free": both_ways(map_free), "dense": both_ways(dense)}


def table(results: dict) -> str:
    """The measurement as text."""
    lines = [
        (
            f"The loss of one layer alone, forward and backward: batch {results['batch']}, {results['heads']}"
            f" heads of width {results['head_width']}"
        ),
        f"{'':10} {'N':>5} {'seconds':>9} {'least':>9} {'peak MB':>9}",
    ]
    for loss in LOSSES:
        for tokens, figures in results[loss].items():
            lines.append(
                f"{loss:10} {tokens:>5} {figures['seconds']:9.4f} {figures['seconds_min']:9.4f}"
                f" {figures['peak_memory_mb']:9.1f}"
            )
    for tokens, figures in results["speed"].items():
        lines.append(
            f"dense / map-free, N = {tokens}: {figures['ratio']:.2f} ({figures['ratio_low']:.2f} to"
            f" {figures['ratio_high']:.2f})"
        )
    lines.append(
        "peak memory, N = 785 / N = 197: "
        + ", ".join(f"{loss} x{results['growth'][loss]:.2f}" for loss in LOSSES)
    )
    return "\n".join(lines)
