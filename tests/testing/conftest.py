"""The fixture of the pytest plugin, which this suite does not load: its other tests need Redis."""

from __future__ import annotations

import pytest

from django_delayq.testing.plugin import delayq

__all__ = ["delayq"]


@pytest.fixture(params=["db", "transactional_db"])
def either_database(request: pytest.FixtureRequest) -> None:
    """The database, once in the transaction of a TestCase and once without."""
    request.getfixturevalue(request.param)
