"""One process that forks all groups of these tests."""

import pytest
from processes import forker


@pytest.fixture(scope="session")
def pods(tmp_path_factory):
    with forker(tmp_path_factory.mktemp("pods")) as made:
        yield made
