"""Where everything is recorded, nothing is left to do: records are read once, and no model is built."""

from collections import Counter

import pytest
from torch import nn

from atbook import records
from atbook.lab.commands import EXPERIMENTS, recorded
from atbook.lab.study import Place, run_study
from atbook.records import read_records, records_file, results_folder
from tests import toy


@pytest.mark.parametrize("name", ["family", "components"])
def test_each_record_is_read_once_and_no_model_is_built(name, tmp_path, monkeypatch):
    """Of studies that need fine-tuned teachers, another teacher, teachers of their own: none of these weights
    is there."""
    calls, parsed, results = Counter(), records.parsed, results_folder()
    (seeds,) = (seeds for *which, seeds in recorded(results) if which == [name, "find"])
    methods = sorted({record.method for record in read_records(name, "find", results=results)})
    records._read_once.cache_clear()
    monkeypatch.setattr(records, "parsed", lambda *line: calls.update(["parsed"]) or parsed(*line))
    monkeypatch.setattr(nn.Module, "__init__", lambda *given, **options: calls.update(["built"]))
    toy.forbid_training(monkeypatch)
    found = run_study(EXPERIMENTS[name], Place("find", None, results, tmp_path), seeds, methods)
    assert len(found) == seeds * len(methods)
    files = {records_file(experiment, "find", results) for experiment in ("transfer", name)}
    assert calls == {"parsed": sum(len(file.read_bytes().splitlines()) for file in files)}
    assert list(tmp_path.iterdir()) == []
