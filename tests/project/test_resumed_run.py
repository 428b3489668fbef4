"""The benchmark of a run that is stopped and taken up again: one small run, and what it refuses."""

import pytest
import resumed_run

from atbook.records import read_file


@pytest.mark.slow
def test_one_small_run_ends_with_the_same_bits(tmp_path):
    out = tmp_path / "benchmarks.jsonl"
    small = "--model glyphs --steps 4 --batch 8"
    resumed_run.main([*small.split(), "--out", str(out)])
    (record,) = read_file(out)
    results = record.results
    assert results["final_loss"] == results["final_loss_resumed"] and results["weights_apart"] == 0
    assert 0 < results["resumed_at"] < results["steps"] == 4 and results["images_per_second"] > 0
