"""What the tests of data share."""

import datasets
import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """Nothing is left in the user's cache, and nothing found there."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    datasets.disable_progress_bars()
