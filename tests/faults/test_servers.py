"""Every installed Redis supports all that the package asks of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from django_delayq import reschedule_message, schedule_message, schedule_messages
from django_delayq.broker.keys import keys
from django_delayq.core.states import State
from testproject.binaries import _output, _redis_candidates
from tests.support.commands import run
from tests.support.processes import Configure, Start
from tests.support.record_of import effects_per_message, once_each, wait_until, wait_until_all
from tests.support.redis_servers import ThisRedis, of
from tests.support.workers import eventually

pytestmark = pytest.mark.usefixtures("transactional_db")

KEYS = keys("delayq", "default")


def programs() -> list[Path]:
    """Return one redis-server of each version: on PATH, in the wheel, and those in DELAYQ_TEST_REDIS_SERVERS."""
    named = map(Path, filter(None, os.environ.get("DELAYQ_TEST_REDIS_SERVERS", "").split(os.pathsep)))
    found = {_output(program, "--version"): program for program in (*named, *_redis_candidates())}
    return [program for version, program in found.items() if version]


@pytest.mark.parametrize("program", programs(), ids=lambda program: _output(program, "--version").split()[2])
def test_every_installed_redis_supports_everything(start: Start, configure: Configure, program: Path) -> None:
    with ThisRedis(program) as server, of(server) as client:
        configure(REDIS=server.url)
        worker = start()
        worker.wait_for("Loaded Redis")
        messages = schedule_messages({"topic": "t.tx", "delay": 0.5 + 0.01 * n} for n in range(50))
        client.config_set("maxmemory", 1)
        full = schedule_message("t.tx", delay=0.1)
        wait_until(full, State.CONSUMED)
        worker.wait_for("Redis is away.*used memory")
        client.config_set("maxmemory", 0)
        client.script_flush()
        wait_until_all(State.CONSUMED, 51)
        worker.wait_for("Redis is back")
        later = schedule_messages({"topic": "t.tx", "delay": 300} for _ in range(20))
        client.flushall()
        eventually(lambda: client.zcard(KEYS.delayed) == 20, "it is loaded again")
        client.delete(KEYS.delayed)
        assert run("delayq_restore").code == 0
        assert client.zcard(KEYS.delayed) == 20
        assert run("delayq_stats").code == run("delayq_check").code == run("delayq_check", "redis").code == 0
        for message in later:
            assert reschedule_message(message, delay=0)
        wait_until_all(State.CONSUMED, 71)
        assert effects_per_message() == once_each([*messages, full, *later])
        worker.stop()
