"""The benchmark of linear attention: its softmax ways agree, linear attention's memory grows with N."""

import linear_attention as benchmark
import pytest
import torch

CPU = torch.device("cpu")


def test_both_softmax_ways_compute_the_same_and_linear_attention_another():
    actions = benchmark.make_actions(17, CPU)
    found = {name: action() for name, action in actions.items()}
    assert found["fused"].shape == (1, 3, 17, 64)
    assert torch.allclose(found["fused"], found["dense"], atol=1e-6)
    assert not torch.allclose(found["fused"], found["linear"], atol=1e-2)


def test_memory_grows_with_the_tokens_and_not_with_their_square():
    small, large = (benchmark.measure(tokens, CPU, 1) for tokens in (128, 512))
    growth = {
        name: large[name]["peak_memory_mb"] / small[name]["peak_memory_mb"] for name in ("dense", "linear")
    }
    assert growth["linear"] == pytest.approx(4, rel=0.15) and growth["dense"] > 6
    assert large["dense / linear"]["ratio"] > 0
