"""A network for one program that loses the reply to the next statement or command of a chosen kind."""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import Any, NamedTuple, Self

from django.conf import settings

from django_delayq.broker import scripts
from tests import settings as servers
from tests.support.proxy import Proxy


class Said(NamedTuple):
    """The bytes by which a statement or a command is recognised on its way."""

    to_redis: bool
    words: bytes


INSERT = Said(False, b"INSERT INTO delayq_message")
CLAIM = Said(False, b"SET state = 'running', deliveries")
EFFECT = Said(False, b'INSERT INTO "tests_app_effect"')
# The handler's statement waits for the row's lock; the recorder's skips locked rows.
SUCCEED = Said(False, b"OF m\n)\nUPDATE delayq_message m\n   SET state = 'consumed'")
RECORD = Said(False, b"SKIP LOCKED\n)\nUPDATE delayq_message m\n   SET state = 'consumed'")
COMMIT = Said(False, b"COMMIT\0")
TAKE = Said(True, scripts.load("take").digest.encode())
LOADED = Said(True, scripts.load("loaded").digest.encode())
# The modes of a put, which may bring its script along.
PUT = Said(True, b"\r\nset\r\n")
FILL = Said(True, b"\r\nfill\r\n")

# The next statement or command of a program after each failpoint.
NEXT = {
    ("producer", "before_insert"): INSERT,
    ("producer", "after_insert"): COMMIT,
    ("producer", "before_put"): PUT,
    ("worker", "before_take"): TAKE,
    ("worker", "after_take"): CLAIM,
    ("worker", "before_handler"): EFFECT,
    ("worker", "before_succeed"): SUCCEED,
    ("worker", "after_succeed"): COMMIT,
    ("worker", "before_record"): RECORD,
    ("worker", "before_put"): PUT,
    ("loader", "after_horizon"): FILL,
    ("loader", "mid_load"): LOADED,
    ("restore", "mid_restore"): FILL,
    ("reaper", "after_reap"): PUT,
}


class Network:
    """A proxy before each server."""

    def __init__(self) -> None:
        assert servers.POSTGRES_SERVER is not None
        assert servers.REDIS_SERVER is not None
        self._server = servers.POSTGRES_SERVER
        self._database = Proxy(self._server.port)
        self._redis = Proxy(servers.REDIS_SERVER.port)
        self._stack = ExitStack()

    @property
    def environment(self) -> dict[str, str]:
        """The environment of the program behind this network."""
        delayq: dict[str, Any] = {**settings.DELAYQ, "REDIS": self._redis.url}
        return {
            "DATABASE_URL": self._server.url.replace(str(self._server.port), str(self._database.port)),
            "DELAYQ_TEST_SETTINGS": json.dumps(delayq),
            "DJANGO_SETTINGS_MODULE": "tests.faults.unprepared_settings",
        }

    def lose_reply_to(self, said: Said) -> None:
        (self._redis if said.to_redis else self._database).lose_reply_to(said.words)

    @property
    def lost(self) -> list[bytes]:
        """The requests that were executed and had no reply."""
        return self._database.lost + self._redis.lost

    def __enter__(self) -> Self:
        self._stack.enter_context(self._database)
        self._stack.enter_context(self._redis)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()
