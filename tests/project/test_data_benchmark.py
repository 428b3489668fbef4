"""The benchmark of the loader: what it calls a ratio, and one small run."""

import data as benchmark
import datasets
import pytest

from atbook.records import read_file
from tests.picture_files import write_parquet


def test_one_small_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(benchmark, "GLYPHS", 128)
    images = write_parquet(tmp_path / "set", "train", range(6))
    out = tmp_path / "data.jsonl"
    small = "--count 4 --batch 2 --step-batch 1 --model glyphs --workers 0 --repetitions 2 --threads 1"
    benchmark.main(["--images", str(images), "--label-column", "label", "--out", str(out), *small.split()])
    (record,) = read_file(out)
    assert record.config["images"] == 4 and record.results["file"]["pixels"] == 16 * 12
    assert len(record.history) == 2
    for pair, one in record.results["ratios"].items():
        above, below = pair.split(" / ")
        by_hand = [turn[above] / turn[below] for turn in record.history]
        assert [one["ratio_low"], one["ratio_high"]] == pytest.approx([min(by_hand), max(by_hand)])
    assert "Photos, 0 workers / decoding alone" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        benchmark.parse(["--count", "0"])
    assert "--count" in capsys.readouterr().err.splitlines()[-1]
