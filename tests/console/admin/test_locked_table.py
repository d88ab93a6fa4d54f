"""Pages while a migration, say, keeps everybody from reading the messages: none waits for it."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connection
from django.test import Client

from django_delayq.console.admin import dead_letters_page
from django_delayq.console.search import language, listing
from tests.support.transactions import lock_table, unfinished

from . import samples

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.postgresql("locks a table")]


@pytest.mark.parametrize(
    ("page", "query"),
    [
        ("deadletters", {}),
        ("message", {"q": "order-17"}),
        ("message", {"q": "order:17"}),
        ("message", {"q": "queue:mailz", "state": "all"}),
    ],
)
def test_a_page_does_not_wait_for_a_lock(
    chief: Client, monkeypatch: pytest.MonkeyPatch, page: str, query: dict[str, Any]
) -> None:
    for module in (dead_letters_page, language, listing):
        for name in (name for name in vars(module) if name.endswith("TIMEOUT_MS")):
            monkeypatch.setattr(module, name, 50)
    with unfinished(lambda: lock_table("delayq_message")):
        response = chief.get(samples.admin_url(f"{page}_changelist"), query)
        with connection.cursor() as cursor:
            cursor.execute("SELECT count(*) FROM pg_locks WHERE mode = 'AccessExclusiveLock' AND granted")
            assert cursor.fetchone()[0], "the page was there when the lock was gone"
    assert response.status_code == 200
