"""Access to Redis: each installed server with the documented rights, and passwords."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import redis

from django_delayq import cancel_message, reschedule_message, schedule_message, schedule_messages
from django_delayq.broker import scripts
from django_delayq.broker.keys import keys
from django_delayq.broker.redis import RedisBroker
from django_delayq.core.states import State
from django_delayq.project import conf
from testproject.binaries import _output, _redis_candidates
from testproject.servers import RedisServer
from tests.support.broker_methods import METHODS
from tests.support.commands import run
from tests.support.known_scripts import SCRIPTS
from tests.support.processes import Configure, Start
from tests.support.record_of import consumed, effects_per_message, log_of, once_each, wait_until
from tests.support.redis_servers import ThisRedis, of
from tests.support.workers import ROOT, eventually

pytestmark = pytest.mark.usefixtures("transactional_db")

KEYS = keys("delayq", "default")
SECRET = "hunter2-of-redis"
COMMANDS = [
    ["delayq_stats"],
    ["delayq_stats", "--json"],
    ["delayq_check"],
    ["delayq_check", "--json"],
    ["delayq_check", "redis"],
    ["delayq_restore", "--dry-run"],
    ["delayq_restore"],
]


def documented_rights() -> list[str]:
    """Read the rights of the Redis user in docs/howto/deploy.rst."""
    text = Path(ROOT, "docs", "howto", "deploy.rst").read_text()
    found = re.search(r"ACL SETUSER delayq on >password ((?:.+\n)+)", text)
    assert found is not None
    return found[1].split()


def make_user(client: redis.Redis, rights: list[str]) -> None:
    client.execute_command("ACL", "SETUSER", "delayq", "on", f">{SECRET}", *rights)


def url_of(server: RedisServer) -> str:
    return f"redis://delayq:{SECRET}@127.0.0.1:{server.port}/0"


def programs() -> list[Path]:
    """Return one redis-server of each version: on PATH, in the wheel, and those in DELAYQ_TEST_REDIS_SERVERS."""
    named = map(Path, filter(None, os.environ.get("DELAYQ_TEST_REDIS_SERVERS", "").split(os.pathsep)))
    found = {_output(program, "--version"): program for program in (*named, *_redis_candidates())}
    return [program for version, program in found.items() if version]


@pytest.mark.parametrize("program", programs(), ids=lambda program: _output(program, "--version").split()[2])
def test_every_installed_redis_supports_everything_and_the_documented_rights_suffice(
    start: Start, configure: Configure, program: Path
) -> None:
    with ThisRedis(program) as server, of(server) as client:
        make_user(client, documented_rights())
        configure(REDIS=url_of(server))
        worker = start()
        worker.wait_for("Loaded Redis")
        messages = schedule_messages({"topic": "t.tx", "delay": 0.5 + 0.01 * n} for n in range(50))
        messages += [schedule_message("t.second_time"), moved := schedule_message("t.tx", delay=600)]
        assert reschedule_message(moved, delay=0.2)
        assert cancel_message(schedule_message("t.tx", delay=600))
        unknown = schedule_message("t.nobody_knows")
        worker.wait_for("No handler for topic t.nobody_knows")
        assert cancel_message(unknown)
        client.config_set("maxmemory", 1)
        messages.append(wait_until(schedule_message("t.tx", delay=0.1), State.CONSUMED))
        worker.wait_for("Redis answers, and cannot be used.*used memory")
        client.config_set("maxmemory", 0)
        client.script_flush()
        worker.wait_for("Redis is back")
        eventually(consumed(len(messages)), "all that is due is delivered")
        later = schedule_messages({"topic": "t.tx", "delay": 300} for _ in range(20))
        client.flushall()
        eventually(lambda: client.zcard(KEYS.delayed) == 20, "it is loaded again")
        for words in COMMANDS:
            ran = run(*words)
            assert ran.code == 0, ran.out + ran.err
        client.delete(KEYS.delayed)
        assert run("delayq_restore").code == 0
        assert client.zcard(KEYS.delayed) == 20
        for message in later:
            assert reschedule_message(message, delay=0)
        eventually(consumed(len(messages) + 20), "all are delivered")
        assert effects_per_message() == once_each([*messages, *later])
        assert worker.stop() == 0
        assert worker.count("NOPERM|No permissions|permission") == 0, worker.log
        assert {entry["object"] for entry in client.acl_log()} <= {"config", "config|get"}


def test_the_documented_rights_reach_nothing_of_others() -> None:
    with RedisServer() as server, of(server) as admin:
        make_user(admin, documented_rights())
        admin.set("others", "data")
        admin.zadd("others:zset", {"a": 1})
        with redis.Redis.from_url(url_of(server)) as client:
            for words in (
                ["FLUSHALL"],
                ["KEYS", "*"],
                ["ACL", "LIST"],
                ["GET", "others"],
                ["ZADD", "others:zset", "1", "b"],
                ["EVAL", "return redis.call('ZRANGE', 'others:zset', 0, -1)", "0"],
                ["EVAL", "return redis.call('FLUSHALL')", "0"],
            ):
                with pytest.raises(
                    redis.ResponseError, match=r"permission|user executing the script can't|unknown command"
                ):
                    client.execute_command(*words)
        assert admin.get("others") == b"data"


def commands_in_scripts() -> set[str]:
    """Return every command that a script can call, whether a test gets there or not."""
    sources = [scripts.load(name).source for name in SCRIPTS]
    return {name.lower() for source in sources for name in re.findall(r'redis\.p?call\(\s*"(\w+)"', source)}


def test_the_documented_rights_are_exactly_the_commands_that_are_used() -> None:
    """Call every method as the documented user; the server counts the commands, and the scripts name the others."""
    with RedisServer() as server, of(server) as client:
        make_user(client, documented_rights())
        broker = RedisBroker(conf.parse({"REDIS": url_of(server)})[0], "default", timeout=2.0)
        client.config_resetstat()
        for call in METHODS.values():
            call(broker)
        broker.close()
        stats = client.info("commandstats")
        used = {name.removeprefix("cmdstat_").split("|")[0] for name in stats} | commands_in_scripts()
        categories = {
            right[2:]: {name.decode() for name in client.execute_command("ACL", "CAT", right[2:])}
            for right in documented_rights()
            if right.startswith("+@")
        }
        refused = {entry["object"] for entry in client.acl_log()}
    granted = {right[1:] for right in documented_rights() if right[0] == "+" and right[1] != "@"}
    covered = set().union(*categories.values())
    # This test itself uses CONFIG. The check uses it too, but does without.
    assert used - covered - {"config"} == granted
    assert refused <= {"config", "config|get"}


def test_a_password_is_never_shown_and_delivery_goes_on_when_it_is_wrong(
    start: Start, configure: Configure, caplog: pytest.LogCaptureFixture
) -> None:
    with RedisServer() as server, of(server) as client:
        client.config_set("requirepass", SECRET)
        configure(REDIS=f"redis://:{SECRET}@127.0.0.1:{server.port}/0")
        worker = start()
        worker.wait_for("Loaded Redis")
        assert log_of(wait_until(schedule_message("t.tx"), State.CONSUMED))[1].ready_at is not None
        said = [run(*words) for words in COMMANDS]
        assert {ran.code for ran in said} == {0}
    with RedisServer() as server, of(server) as client:
        client.config_set("requirepass", "another one")
        configure(REDIS=url_of(server))
        refused = start()
        refused.wait_for("Redis answers, and cannot be used.*(Authentication|WRONGPASS|invalid username)")
        wait_until(schedule_message("t.tx"), State.CONSUMED)
        wrong = [run(*words) for words in COMMANDS]
        assert {ran.code for ran in wrong if ran.code} <= {1, 2, 69}
    worker.wait_for("Redis is away")
    # Neither server is there any more.
    said += [*wrong, *(run(*words) for words in COMMANDS)]
    for text in (worker.log, refused.log, caplog.text, *(ran.out + ran.err for ran in said)):
        assert SECRET not in text
