"""A client of the HTTP door, with a token of the namespace ``ns1``; and the door as a server by itself."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from django.test import Client

from django_delayq.http import tokens
from tests.http.answers import ROWS, Row
from tests.http.servers import DOOR, PROJECT, Server


class Wire:
    """Sends requests as clients do, and keeps the last answer."""

    def __init__(self) -> None:
        self.client = Client(enforce_csrf_checks=True)
        _token, self.token = tokens.make("ns1")
        self.last: Any = None
        # The answers to the rows of the table that were asked for, and the ids of the jobs in them.
        self.told: dict[str, Any] = {}
        self.ids: dict[str, str] = {}

    def __call__(self, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, Any]:
        """Return the status and the content of an answer. ``X_Token=""`` sends none."""
        answer = self.send(method, path, body, **headers)
        text = answer.content.decode()
        return answer.status_code, json.loads(text) if text else None

    def send(self, method: str, path: str, body: bytes = b"", **headers: str) -> Any:
        """Return an answer."""
        sent = {"X-Token": self.token, **{name.replace("_", "-"): value for name, value in headers.items()}}
        sent = {name: value for name, value in sent.items() if value}
        kind = "application/x-www-form-urlencoded"
        self.last = self.client.generic(method, path, body, content_type=kind, headers=sent)
        return self.last

    def text(self, method: str, path: str) -> str:
        """Return the text of an answer."""
        return str(self.send(method, path).content.decode())

    def filled(self, text: str) -> str:
        """Return a text of the table with the ids of jobs and the token in it."""
        return re.sub("<id of (.+?)>", lambda found: self.ids[found[1]], text.replace("<token>", self.token))

    def row(self, row: Row) -> Any:
        """Return the answer to the request of a row, after what it says comes first. It is sent once."""
        if row.name not in self.told:
            for step in row.after:
                if isinstance(step, str):
                    self.row(ROWS[step])
                else:
                    step(self)
            self.told[row.name] = answer = self.send(row.method, self.filled(row.path), row.sent, **row.headers)
            if found := re.search('"job_id":"(.*?)"', answer.content.decode()):
                self.ids[row.name] = found[1]
        return self.told[row.name]


@pytest.fixture
def wire(settings: Any, transactional_db: None) -> Wire:
    settings.ROOT_URLCONF = "tests.http.urls"
    settings.DELAYQ = {**settings.DELAYQ, "PULL_QUEUES": {"ns1.*": {}}}
    return Wire()


@pytest.fixture
def server(wire: Wire) -> Iterator[Server]:
    """``delayq_http``."""
    with Server(token=wire.token) as started:
        yield started


@pytest.fixture(params=[DOOR, PROJECT], ids=["delayq_http", "asgi.py"])
def asgi_server(request: pytest.FixtureRequest, wire: Wire) -> Iterator[Server]:
    """The door as a server by itself, and in a project."""
    with Server(token=wire.token, module=request.param) as started:
        yield started
