"""What all tests of runs share."""

import datasets
import pytest

from tests.helpers import draw_nothing_on_meta


@pytest.fixture(autouse=True, scope="session")
def quick_skeletons():
    with pytest.MonkeyPatch.context() as patch:
        draw_nothing_on_meta(patch)
        yield


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    datasets.disable_progress_bars()
