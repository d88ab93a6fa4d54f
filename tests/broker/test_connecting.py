"""Nobody waits for a connection longer than for one timeout: names, TCP, TLS and the login count together."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from django.test import Client

from django_delayq import cancel_message, reschedule_message, schedule_message
from django_delayq.broker.base import Entry
from django_delayq.broker.redis import RedisBroker
from django_delayq.core.exceptions import BrokerUnavailable
from django_delayq.project import conf
from testproject.servers import RedisServer
from tests.conftest import close_publishers
from tests.support.commands import run
from tests.support.forks import forked
from tests.support.names import NAME, Names
from tests.support.proxy import Proxy
from tests.support.sentinel import FACTORY
from tests.support.tls import OPENSSL, Authority, Front
from tests.support.workers import PATIENCE, ROOT, eventually

from .bench import connections_made

Make = Callable[..., RedisBroker]
# As those who schedule. Seconds.
SHORT = 0.25


@pytest.fixture
def make(server: RedisServer) -> Iterator[Make]:
    server.start()
    made: list[RedisBroker] = []

    def broker(place: str, timeout: float = SHORT) -> RedisBroker:
        made.append(RedisBroker(conf.parse({"REDIS": place})[0], "default", timeout=timeout))
        return made[-1]

    yield broker
    for each in made:
        each.close()


@pytest.fixture
def named(server: RedisServer) -> str:
    """The URL of the server by its name."""
    return f"redis://{NAME}:{server.port}/0"


# --- names ------------------------------------------------------------------------------------------------------------

CALLS: dict[str, Callable[[RedisBroker], object]] = {
    "a put": lambda broker: broker.send_put("default", [Entry(1, 0, 0)]),
    "a remove": lambda broker: broker.remove("default", [1]),
    "a take": lambda broker: broker.take("default", 1),
    "a listener": lambda broker: broker.listen(["default"], 1.0),
    "a check": lambda broker: broker.tick(),
    "a report": lambda broker: broker.server_info(),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_no_call_stands_while_the_name_server_is_silent(
    make: Make, named: str, names: Names, call: Callable[[RedisBroker], object]
) -> None:
    with pytest.raises(BrokerUnavailable):
        call(make(named))
    assert names.asked
    assert not names.gave_up


def test_no_sentinel_holds_a_call_up_while_its_name_is_not_found(
    make: Make, named: str, names: Names, server: RedisServer, settings: Any
) -> None:
    settings.DJANGO_REDIS_CONNECTION_FACTORY = FACTORY
    cache = {
        "BACKEND": "django_redis.cache.RedisCache",
        "LOCATION": "redis://main/0",
        "OPTIONS": {
            "CLIENT_CLASS": "django_redis.client.SentinelClient",
            "CONNECTION_FACTORY": FACTORY,
            "SENTINELS": [(NAME, server.port), (NAME, server.port + 1)],
        },
    }
    settings.CACHES = {**settings.CACHES, "guarded": cache}
    with pytest.raises(BrokerUnavailable):
        make("guarded").tick()
    assert names.asked
    assert not names.gave_up


def test_one_lookup_is_under_way_whoever_calls(make: Make, named: str, names: Names) -> None:
    """A thread that finds it under way goes on at once. So a silent name server is asked once, by one thread."""
    first = make(named)
    with pytest.raises(BrokerUnavailable, match="not connected within"):
        first.tick()
    for broker in (first, make(named), first, make(named)):
        with pytest.raises(BrokerUnavailable, match="still not connected"):
            broker.tick()
    assert (len(names.asked), names.waiting) == (1, 1)


def test_a_connection_that_came_late_is_there_for_the_next_call(
    make: Make, named: str, names: Names, server: RedisServer
) -> None:
    broker = make(named)
    with redis.Redis.from_url(server.url) as other:
        before = connections_made(other)
        with pytest.raises(BrokerUnavailable):
            broker.tick()
        names.speak()
        eventually(lambda: connections_made(other) > before, "the attempt goes on")
        eventually(lambda: names.waiting == 0, "the attempt is over")
        assert broker.tick().tick > 0
        assert connections_made(other) == before + 1
    assert len(names.asked) == 1


def test_the_process_that_was_forked_meanwhile_connects(make: Make, named: str, names: Names) -> None:
    broker = make(named)
    with pytest.raises(BrokerUnavailable):
        broker.tick()

    def connects() -> bool:
        # Found in this process only.
        names.answers = names.answers.parent
        return broker.tick().tick > 0

    with warnings.catch_warnings():
        # A thread is under way: that is the point.
        warnings.simplefilter("ignore", DeprecationWarning)
        with forked(connects):
            pass


def test_an_error_of_the_name_server_is_told_at_once(make: Make, names: Names) -> None:
    with pytest.raises(BrokerUnavailable, match=r"Error -\d+ connecting to delayq\.invalid|Name or service|not known"):
        make("redis://delayq.invalid:6379/0", timeout=PATIENCE).tick()


@pytest.mark.parametrize("is_numeric", [True, False], ids=["a number", "a name"])
def test_an_address_that_needs_no_lookup_is_connected_in_the_thread_of_the_caller(
    make: Make, named: str, names: Names, server: RedisServer, is_numeric: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    names.speak()
    threads = []
    look_up = socket.getaddrinfo

    def noted(*arguments: Any) -> Any:
        threads.append(threading.current_thread())
        return look_up(*arguments)

    monkeypatch.setattr(socket, "getaddrinfo", noted)
    make(server.url if is_numeric else named).tick()
    assert [thread is threading.current_thread() for thread in threads] == [is_numeric]


SCRIPT = """
import socket, threading
from django.conf import settings

settings.configure()
socket.getaddrinfo = lambda *arguments: threading.Event().wait()
from django_delayq.broker.connection import connect
try:
    connect("redis://redis.test:6379/0", timeout=0.1).ping()
except Exception as error:
    print("went on", type(error).__name__)
"""


def test_a_process_ends_though_a_lookup_never_does() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "went on TimeoutError\n", "")


TWO_THREADS = """
import sys, threading, time
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder

from django.conf import settings

settings.configure()
from django_delayq.broker.address import describe, problem
from django_delayq.project import conf

given = conf.parse({"REDIS": "unix:///redis.test/socket"})[0]
asked, answers = [], []


def ask():
    answers.append((describe(given), problem(given)))


other = threading.Thread(target=ask)


def waits():
    frame = sys._current_frames().get(other.ident)
    while frame is not None and (frame.f_code.co_filename, frame.f_code.co_name) != (
        "<frozen importlib._bootstrap>",
        "acquire",
    ):
        frame = frame.f_back
    return frame is not None


class Halfway(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if threading.current_thread() is other:
            asked.extend([name] if name.startswith("redis.") else [])
        elif name == "redis.client":
            spec = PathFinder.find_spec(name, path, target)
            spec.loader.exec_module = partial(halfway, spec.loader.exec_module)
            return spec


def halfway(go_on, module):
    other.start()
    while not (waits() or asked):
        time.sleep(0.001)
    go_on(module)


sys.meta_path.insert(0, Halfway())
import redis

other.join()
print(asked, answers)
"""


def test_a_thread_waits_until_another_one_has_imported_redis_py() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", TWO_THREADS], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "[] [('unix:/redis.test/socket db 0', '')]\n", "")


# --- the steps --------------------------------------------------------------------------------------------------------


@pytest.fixture
def guarded() -> Iterator[RedisServer]:
    """A server with a password."""
    with RedisServer() as server:
        with redis.Redis.from_url(server.url) as client:
            client.config_set("requirepass", "secret")
        yield server


def test_all_steps_share_one_timeout(guarded: RedisServer, make: Make) -> None:
    """Each answer comes in time. But the login and the choice of the database are two of them, one after the other."""
    with Proxy(guarded.port) as network, redis.Redis(port=guarded.port, password="secret") as other:
        broker = make(f"redis://:secret@127.0.0.1:{network.port}/1", timeout=2.0)
        before = connections_made(other)
        # On the way there and back.
        network.delay = 0.75
        with pytest.raises(redis.TimeoutError, match="not connected within 2 s"):
            broker.client.ping()
        network.clear()
        eventually(lambda: _is_connected(broker), "the connection that came late")
        assert connections_made(other) == before + 1


def _is_connected(broker: RedisBroker) -> bool:
    try:
        return bool(broker.client.ping())
    except redis.TimeoutError:
        return False


@pytest.mark.skipif(OPENSSL is None, reason="needs the openssl program, to make certificates")
def test_tls_and_the_login_share_one_timeout(
    guarded: RedisServer, make: Make, tmp_path_factory: pytest.TempPathFactory
) -> None:
    authority = Authority(tmp_path_factory.mktemp("tls"), "ours")
    certificate, key = authority.issue("localhost")
    with Front(certificate, key, guarded.port) as front, Proxy(front.port) as network:
        network.delay = 0.75
        place = f"rediss://:secret@localhost:{network.port}/0?ssl_ca_certs={authority.certificate}"
        with pytest.raises(BrokerUnavailable, match="not connected within 2 s"):
            make(place, timeout=2.0).tick()
        network.clear()
        assert make(place, timeout=PATIENCE).tick().tick > 0


def test_a_connection_is_made_with_no_command_that_is_not_needed(guarded: RedisServer, make: Make) -> None:
    with redis.Redis(port=guarded.port, password="secret") as other:
        other.config_resetstat()
        with make(f"redis://:secret@127.0.0.1:{guarded.port}/1", PATIENCE).client as client:
            client.ping()
        used = {name.removeprefix("cmdstat_") for name in other.info("commandstats")}
    assert used - {"info", "config", "config|resetstat"} == {"auth", "select", "ping"}


# --- those who call ---------------------------------------------------------------------------------------------------


@pytest.fixture
def project(named: str, names: Names, settings: Any) -> Iterator[Names]:
    """The project's Redis has a name, and the name server is silent."""
    settings.DELAYQ = {**settings.DELAYQ, "REDIS": named}
    yield names
    names.speak()
    eventually(lambda: names.waiting == 0)
    close_publishers()


@pytest.mark.django_db(transaction=True)
def test_no_call_of_the_project_stands(project: Names) -> None:
    message = schedule_message("t.tx", delay=60)
    reschedule_message(message.pk, delay=90)
    cancel_message(message.pk)
    assert project.asked
    assert not project.gave_up


@pytest.mark.django_db(transaction=True)
@pytest.mark.urls("django_delayq.urls")
def test_the_probe_is_answered(project: Names) -> None:
    page = Client().get("/ready/")
    assert (page.status_code, page.json()["status"], page.json()["redis"]) == (200, "degraded", "unavailable")
    assert project.asked
    assert not project.gave_up


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("command", ["delayq_check", "delayq_check redis", "delayq_stats", "delayq_queue pause mail"])
def test_no_command_stands(project: Names, command: str) -> None:
    ran = run(*command.split())
    if command.startswith("delayq_check"):
        assert ran.code == 69
    if command != "delayq_queue pause mail":
        assert "not connected within 2 s" in ran.out + ran.err
        assert project.asked
    assert not project.gave_up
