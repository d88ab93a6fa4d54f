"""A client of the HTTP door, with a token of the namespace ``ns1``; and the door as a server by itself."""

from __future__ import annotations

import http.client
import json
import re
import sys
from contextlib import closing
from typing import Any

import pytest
from django.conf import settings as django_settings
from django.test import Client

from django_delayq.http import tokens
from tests.http.answers import ROWS, Row
from tests.support.workers import PATIENCE, Worker


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


class Server(Worker):
    """A ``delayq_http`` in a process of its own, at a port that is free."""

    def __init__(self, *arguments: str, token: str = "") -> None:
        self.token = token
        self._start(
            [sys.executable, "-m", "django", "delayq_http", "--port", "0", *arguments],
            {"DELAYQ_TEST_SETTINGS": json.dumps(django_settings.DELAYQ)},
        )
        found = self.wait_for(r"^Serves http://(.+):(\d+)$")
        self.host, self.port = found[1], int(found[2])

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.host, self.port, timeout=PATIENCE)

    def ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, Any]:
        with closing(self.connect()) as connection:
            connection.request(method, path, body, {"X-Token": self.token})
            answer = connection.getresponse()
            text = answer.read()
        return answer.status, json.loads(text) if text else None


@pytest.fixture
def wire(settings: Any, transactional_db: None) -> Wire:
    settings.ROOT_URLCONF = "tests.http.urls"
    settings.DELAYQ = {**settings.DELAYQ, "PULL_QUEUES": {"ns1.*": {}}}
    return Wire()
