"""One edition of A1 for all tests, and one cage: none changes it."""

import pytest

from tests.course.helpers import edition_of


@pytest.fixture(scope="session")
def edition(tmp_path_factory):
    return edition_of(tmp_path_factory.mktemp("edition"), "a1", "a")


@pytest.fixture(scope="session")
def cage(edition):
    with edition.cage() as made:
        yield made
