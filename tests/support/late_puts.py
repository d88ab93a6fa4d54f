"""A plugin that makes each put of the test process late: ``pytest -p tests.support.late_puts``.

A call that schedules does not wait for Redis. With this plugin the put leaves a moment after the call has returned, so
a test that reads or changes Redis right after a call fails each time, and not once in a thousand runs.
"""

from __future__ import annotations

import threading
from typing import Any

from django_delayq.broker.puts import PutConnection, SentPut

# A put leaves this long after its call. Seconds.
LATE = 0.06

_read, _write, _close = PutConnection.read, PutConnection.write, PutConnection.close
# The put of each connection that has not left yet, and the errors that it met.
_under_way: dict[PutConnection, tuple[threading.Thread, list[BaseException]]] = {}


def pytest_configure() -> None:
    methods: dict[str, Any] = {"read": read, "write": write, "close": close}
    for name, method in methods.items():
        setattr(PutConnection, name, method)


def write(self: PutConnection, put: SentPut, mode: str = "set") -> None:
    _raise_errors(self)
    errors: list[BaseException] = []

    def leave() -> None:
        try:
            _write(self, put, mode)
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    self.unread = put
    timer = threading.Timer(LATE, leave)
    timer.daemon = True
    _under_way[self] = timer, errors
    timer.start()


def read(self: PutConnection) -> bool:
    _raise_errors(self)
    return _read(self)


def close(self: PutConnection) -> None:
    _wait(self)
    _close(self)


def _wait(connection: PutConnection) -> list[BaseException]:
    if connection not in _under_way:
        return []
    thread, errors = _under_way.pop(connection)
    thread.join()
    return errors


def _raise_errors(connection: PutConnection) -> None:
    for error in _wait(connection):
        raise error
