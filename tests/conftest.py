"""Fixtures of all tests: the servers of this run, which tests may kill, restart and freeze, and an empty Redis."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from django.apps import apps
from django.db import connection, connections, transaction
from django.utils import translation
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings

from django_delayq import extensions
from django_delayq.broker import publisher
from django_delayq.broker.broker_tuning import BrokerTuning
from django_delayq.core import once
from django_delayq.core.known_record import doubt_identity
from django_delayq.models.messages import IS_CONSISTENT, Message
from django_delayq.project import registry
from django_delayq.recurring import declarations
from testproject.servers import PostgresServer, Server
from tests import settings
from tests.support.replica import replica
from tests.support.rows import unguarded

# A busy machine may take any time for an example. In CI, Hypothesis would draw the same examples in each run.
hypothesis_settings.register_profile(
    "unhurried", deadline=None, derandomize=False, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
hypothesis_settings.load_profile("unhurried")

# Fixtures that tests of several folders use.
_of_redis = ("redis_servers", "the_redis") if settings.HAS_REDIS else ("without_redis",)
pytest_plugins = [
    f"tests.support.{module}"
    for module in ("assembled", "limits", "names", "open_connections", "processes", "together", *_of_redis)
]

HERE = Path(__file__).parent

# The console's own tests. Single tests elsewhere that need it have the marker "console".
OF_THE_CONSOLE = ["browser", "console"]

if not apps.is_installed("django_delayq.console"):
    collect_ignore = OF_THE_CONSOLE

# Tests that use a database, but say no more on a second one, and why. docs/explanation/testing.rst shows this table.
_OF_PROCESSES = "Signals, forks, exit codes and successors of processes ask no database anything."
_OF_REDIS = "What a worker does when Redis fails is decided above the statements of a database."
_OF_SERVERS = "Needs a database that is reached over a network."
OF_ANY_DATABASE = {
    "browser": "Pages in Chromium; ``console`` asks for their statements on both.",
    "commands/test_worker_start.py": _OF_PROCESSES,
    "docs": "The examples are those of the first run.",
    "faults/test_access.py": _OF_REDIS,
    "faults/test_clock_skew.py": _OF_REDIS,
    "faults/test_database_failover.py": _OF_SERVERS,
    "faults/test_failpoints.py": "About a seam of the tests.",
    "faults/test_lost_replies.py": _OF_REDIS,
    "faults/test_matrix.py": _OF_SERVERS,
    "faults/test_network.py": _OF_SERVERS,
    "faults/test_oracle.py": "About the judge of ``test_matrix.py``.",
    "faults/test_redis_faults.py": _OF_REDIS,
    "faults/test_tls.py": _OF_REDIS,
    "faults/test_unusual_redis.py": _OF_REDIS,
    "torture": "About the torture, which has a PostgreSQL of its own.",
    "worker/test_handlers.py": _OF_PROCESSES,
    "worker/test_lifetime.py": _OF_PROCESSES,
    "worker/test_load.py": _OF_PROCESSES,
}
assert all((HERE / place).exists() for place in [*OF_THE_CONSOLE, *OF_ANY_DATABASE])


def pytest_configure() -> None:
    """Undo what ``nohup`` and a shell's ``&`` do, for the workers that tests start.

    A caught signal is not ignored by a new program.
    """
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN:
            # Tests of Ctrl-C need what Python does by default.
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else lambda *_: None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--second-database",
        action="store_true",
        help="leave out the tests that say no more on another database: for a run on SQLite after one on PostgreSQL",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that need the console where it is not installed, and those that a second run repeats.

    What needs PostgreSQL is skipped on another database.
    """
    for item in items:
        if (marker := item.get_closest_marker("postgresql")) and connection.vendor != "postgresql":
            item.add_marker(pytest.mark.skip(reason=marker.args[0] if marker.args else "needs PostgreSQL"))
    left_out: set[pytest.Item] = set()
    if not apps.is_installed("django_delayq.console"):
        left_out |= {item for item in items if item.get_closest_marker("console")}
    if config.getoption("second_database"):
        left_out |= {item for item in items if not uses_database(item) or _is_of_any_database(item)}
    if left_out:
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=list(left_out))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Ask after each test whether a row contradicts itself: no constraint of the table says so."""
    found = _contradictory() if uses_database(item) else []
    # In any case the test's fixtures end first.
    yield
    assert found == [], "these messages have rows that contradict themselves"


def _contradictory() -> list[int]:
    if connection.connection is None or connection.needs_rollback:
        return []
    # A test may have stopped the server, left the connection in any state, have another vendor here, or have been
    # skipped before it had a database.
    with contextlib.suppress(Exception), transaction.atomic():
        return list(unguarded(Message).filter(~IS_CONSISTENT).values_list("pk", flat=True))
    return []


def uses_database(item: pytest.Item) -> bool:
    asked = {"db", "transactional_db"}.intersection(getattr(item, "fixturenames", ()))
    return bool(asked or item.get_closest_marker("django_db"))


def _is_of_any_database(item: pytest.Item) -> bool:
    return any(item.path.is_relative_to(HERE / place) for place in OF_ANY_DATABASE)


AServer = TypeVar("AServer", bound=Server)


@pytest.fixture(scope="session")
def django_db_modify_db_settings() -> None:
    """Keep the names of the databases: each worker of pytest-xdist has a server of its own."""


@pytest.fixture
def postgres_server() -> Iterator[PostgresServer]:
    """The running PostgreSQL server. It is started again after the test if the test has ended it."""
    if settings.POSTGRES_SERVER is None:
        pytest.skip("needs PostgreSQL")
    yield from running(settings.POSTGRES_SERVER)
    # The connections that were open when the server ended are dead, and the next step is to empty the tables.
    connections.close_all()


def running(server: AServer) -> Iterator[AServer]:
    server.start()
    yield server
    server.start()


@pytest.fixture(autouse=True)
def _no_database_of_other_tests(request: pytest.FixtureRequest) -> None:
    """Forget what is known of a database, among it its identity, for each test that starts with empty tables."""
    if uses_database(request.node):
        close_publishers()
        for using in connections:
            doubt_identity(using)


# Of a scope that begins before pytest-django looks for the databases of a test.
@pytest.fixture(scope="class")
def _replica() -> Iterator[None]:
    with replica():
        yield


@pytest.fixture(params=["Router", "InstanceRouter"])
def read_from_a_replica(_replica: None, settings: Any, request: pytest.FixtureRequest) -> None:
    """Have the project read from a replica. The test names ``REPLICA`` among its databases."""
    settings.DATABASE_ROUTERS = [f"tests.support.replica.{request.param}"]


def close_publishers() -> None:
    """End the publishers of the test before: the answers to their puts have come, and no failure makes one rest."""
    for using in connections:
        there = publisher.get(using)
        if there is not None:
            there.broker.close()
    publisher.get.cache_clear()


@pytest.fixture
def redis_has_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Redis be slow. An answer that is late counts as a failure, after which the next puts are left out."""
    monkeypatch.setattr(publisher, "usual", BrokerTuning(timeout=10.0))
    publisher.get.cache_clear()


@pytest.fixture(autouse=True)
def _no_handlers_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the handlers that a test registers when it is over."""
    monkeypatch.setattr(registry, "declared", registry.handlers())


@pytest.fixture(autouse=True)
def _no_language_of_other_tests() -> Iterator[None]:
    """Speak the language of the settings again: a request leaves its own active."""
    yield
    translation.deactivate()


@pytest.fixture(autouse=True)
def _nothing_was_logged() -> None:
    """Have what a process logs once logged again."""
    once.logged.clear()


@pytest.fixture
def own_additions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no additions of apps but those that the test makes."""
    monkeypatch.setattr(extensions, "additions", extensions.Additions())


@pytest.fixture
def own_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no declared schedules but those of the test."""
    monkeypatch.setattr(declarations, "declared", [])
