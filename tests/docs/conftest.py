"""Fixtures and helpers that the tests of the documentation share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from django.dispatch import Signal

from django_delayq import signals
from django_delayq.project import process_start, registry
from testproject.servers import RedisServer
from testproject.shop.models import Order
from tests.support.commands import run

from .blocks import DOCS, run_python
from .project import Project

Run = Callable[..., dict[str, Any]]


def deliver(*options: str) -> None:
    """Run what is due in one thread, by the command."""
    assert run("run_delayq", "--once", "--threads", "1", *options).code == 0


@pytest.fixture
def free_topics(monkeypatch: pytest.MonkeyPatch, own_schedules: None) -> None:
    """Let examples register handlers for topics that the test's apps have, and receivers, until the test ends."""
    registry.declared.clear()
    monkeypatch.setattr(process_start, "functions", {})
    for signal in vars(signals).values():
        if isinstance(signal, Signal):
            monkeypatch.setattr(signal, "receivers", [*signal.receivers])


@pytest.fixture
def mysite(tmp_path: Path, redis_server: RedisServer) -> Iterator[Project]:
    """A new project ``mysite`` with an app ``orders``."""
    with Project(tmp_path, redis_server.url) as project:
        project.run("django-admin startproject mysite")
        project.run("cd mysite")
        project.run("python manage.py startapp orders")
        yield project


@pytest.fixture
def run_page(free_topics: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Run the Python examples of a page, as modules of an app ``orders`` that has the shop's orders.

    ``modules`` are others that the page leaves to the reader: their names, and what is in each.
    """

    def run_examples(page: str, modules: dict[str, dict[str, Any]] | None = None, **names: Any) -> dict[str, Any]:
        for name, content in {"": {}, "models": {"Order": Order}, **(modules or {})}.items():
            module = ModuleType(f"orders.{name}" if name else "orders")
            vars(module).update(content)
            if not name:
                module.__path__ = []
            monkeypatch.setitem(sys.modules, module.__name__, module)
        given = {"__name__": "orders.examples", "__package__": "orders", **names}
        return run_python(DOCS / f"{page}.rst", given)

    yield run_examples
    for name in [name for name in sys.modules if name.startswith("orders.")]:
        del sys.modules[name]
