"""Transactions that stay open as long as a test needs them, and the locks of tables, on PostgreSQL."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from django.db import connection, connections, transaction

from django_delayq.record.sql import statements
from django_delayq.record.sql.holders import OLD, Holder
from tests.support.workers import PATIENCE


@contextmanager
def unfinished(act: Callable[[], object]) -> Iterator[threading.Event]:
    """Call a function in another thread's transaction, which stays open until the event is set or the block is left."""
    begun, go = threading.Event(), threading.Event()

    def run() -> None:
        try:
            with transaction.atomic():
                act()
                begun.set()
                go.wait(PATIENCE)
        finally:
            connections.close_all()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert begun.wait(PATIENCE)
        yield go
    finally:
        go.set()
        thread.join()


def lock_table(table: str, mode: str = "ACCESS EXCLUSIVE") -> None:
    """Lock a table until the transaction ends. Nobody may even read it, unless the mode says less."""
    with connection.cursor() as cursor:
        cursor.execute(f"LOCK TABLE {table} IN {mode} MODE")


def waits_for_a_lock(pid: int | None = None) -> bool:
    """Tell whether a session waits for a lock: that of a process of the server, or any."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT EXISTS (SELECT FROM pg_locks WHERE pid = coalesce(%s, pid) AND NOT granted)", [pid])
        return bool(cursor.fetchone()[0])


def make_snapshots_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the record report each snapshot as one that a million transactions have followed."""
    record = statements("default")
    found = record.snapshot_holders

    def aged() -> list[Holder]:
        return [holder._replace(transactions=OLD.transactions + holder.transactions) for holder in found() or []]

    monkeypatch.setattr(record, "snapshot_holders", aged)
