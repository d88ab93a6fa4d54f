"""A client of the HTTP door, with a token of the namespace ``ns1``."""

from __future__ import annotations

import json
from typing import Any

import pytest
from django.test import Client

from django_delayq.http import tokens


class Wire:
    """Sends requests as clients do, and keeps the last answer."""

    def __init__(self) -> None:
        self.client = Client(enforce_csrf_checks=True)
        _token, self.token = tokens.make("ns1")
        self.last: Any = None

    def __call__(self, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, Any]:
        """Return the status and the content of an answer. ``X_Token=""`` sends none."""
        sent = {"X-Token": self.token, **{name.replace("_", "-"): value for name, value in headers.items()}}
        sent = {name: value for name, value in sent.items() if value}
        kind = "application/x-www-form-urlencoded"
        self.last = answer = self.client.generic(method, path, body, content_type=kind, headers=sent)
        text = answer.content.decode()
        return answer.status_code, json.loads(text) if text else None


@pytest.fixture
def wire(settings: Any, transactional_db: None) -> Wire:
    settings.ROOT_URLCONF = "tests.http.urls"
    settings.DELAYQ = {**settings.DELAYQ, "PULL_QUEUES": {"ns1.*": {}}}
    return Wire()
