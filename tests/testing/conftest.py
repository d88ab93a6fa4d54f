"""The fixture of the pytest plugin, which this suite does not load: its other tests need Redis."""

from __future__ import annotations

from typing import Any

import pytest

from django_delayq.testing.plugin import delayq

__all__ = ["delayq"]


IN_A_TRANSACTION = pytest.param("in a transaction", marks=pytest.mark.django_db)
WITHOUT_ONE = pytest.param("without one", marks=pytest.mark.django_db(transaction=True))


@pytest.fixture(params=[IN_A_TRANSACTION, WITHOUT_ONE])
def either_database() -> None:
    """The database, once in the transaction of a TestCase and once without."""


@pytest.fixture
def immediate(settings: Any) -> None:
    """Have each message run at the call that makes it due."""
    settings.DELAYQ = {**settings.DELAYQ, "TESTING": "immediate"}
