"""While names do not resolve a worker delivers by query: it waits for a name server neither at its start nor later."""

from __future__ import annotations

import pytest

from django_delayq import schedule_message
from django_delayq.core.states import State
from testproject.servers import RedisServer
from tests.support.names import NAME, Names
from tests.support.processes import Configure, Start
from tests.support.proxy import Proxy
from tests.support.record_of import log_of, wait_until


@pytest.mark.usefixtures("transactional_db")
def test_a_worker_delivers_while_the_name_server_is_silent(
    start: Start, configure: Configure, redis_server: RedisServer, names: Names
) -> None:
    with Proxy(redis_server.port) as network:
        configure(REDIS=f"redis://{NAME}:{network.port}/0")
        worker = start(prefix="env DJANGO_SETTINGS_MODULE=tests.support.names_settings")
        worker.wait_for("Redis is away")
        wait_until(schedule_message("t.tx"), State.CONSUMED)
        names.speak()
        worker.wait_for("Redis is back")
        assert log_of(wait_until(schedule_message("t.tx", delay=0.5), State.CONSUMED))[1].ready_at is not None
        names.be_silent()
        network.cut()
        wait_until(schedule_message("t.tx"), State.CONSUMED)
        assert worker.stop() == 0
    assert not names.gave_up
    # Said by a thread that waited for an answer as long as it could.
    assert worker.count("Temporary failure in name resolution") == 0, worker.log
    assert worker.count("Somebody has written") == 0, worker.log
