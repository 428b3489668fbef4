"""The benchmark of processes: what it computes against a ring played through, and one small run."""

import processes
import pytest

from atbook.records import read_file
from tests.helpers import in_a_fork


def ring(pieces, rounds):
    """Bytes that every process sends when in each round each passes one of its `pieces` on to its
    neighbour."""
    sent = [0] * len(pieces)
    for turn in range(rounds):
        for rank in range(len(pieces)):
            sent[rank] += pieces[(rank - turn) % len(pieces)]
    return sent


@pytest.mark.parametrize("gpus", [2, 5, 8])
def test_bytes_of_an_all_reduce(gpus):
    """A ring: n - 1 rounds in which pieces are summed up, n - 1 in which the sums go round."""
    weights = 11 * 2 * 5 * 8
    pieces = [4 * weights // gpus] * gpus
    sent = [one + other for one, other in zip(ring(pieces, gpus - 1), ring(pieces, gpus - 1))]
    assert sent == [processes.all_reduced(weights, gpus)] * gpus


def test_what_is_computed_for_vit_large():
    """Against numbers of the paper and of ViT-L by hand: 2,735 GPU-hours, 626 steps an epoch of 2,048 of
    1,281,167 images."""
    large = processes.large(link=50.0)
    assert large["weights"] == 304_326_632
    assert large["weights_in_mlps"] == 24 * (2 * 4 * 1024 * 1024 + 5 * 1024)
    assert large["gpu_seconds_per_step"] == pytest.approx(2735 * 3600 / (100 * 626))
    row = large["gpus"]["64"]
    assert row["images_per_gpu"] == 32 and row["compute_seconds"] == pytest.approx(2.4575, abs=1e-3)
    assert row["all_reduce_seconds"] == pytest.approx(2 * 63 / 64 * 304_326_632 * 4 / 50e9)


@pytest.mark.slow
def test_a_small_run_writes_its_record(tmp_path):
    path = tmp_path / "processes.jsonl"
    words = "--batch 16 --steps 2 --repetitions 1".split()
    done = in_a_fork(tmp_path, processes.main, [*words, "--out", str(path)], seconds=300)
    assert done.code == 0, done.said
    (record,) = read_file(path)
    results = record.results
    one, both = (results["measured"][name] for name in "12")
    assert results["speed_up"]["ratio"] == pytest.approx(one["seconds"] / both["seconds"])
    assert both["steps_per_second"] > 0 and set(results["large"]["gpus"]) == {"8", "16", "32", "64"}
