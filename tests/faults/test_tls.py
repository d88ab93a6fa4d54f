"""rediss:// encrypts, and verifies the certificate's issuer and host."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis

from django_delayq import schedule_message
from django_delayq.core.states import State
from testproject.servers import RedisServer
from tests.support.processes import Configure, Start
from tests.support.record_of import log_of, wait_until
from tests.support.tls import OPENSSL, Authority, Front

pytestmark = [
    pytest.mark.usefixtures("transactional_db"),
    pytest.mark.skipif(OPENSSL is None, reason="needs the openssl program, to make certificates"),
]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"), "ours")


@pytest.mark.usefixtures("redis_has_time")
def test_a_worker_delivers_over_tls(start: Start, configure: Configure, authority: Authority) -> None:
    certificate, key = authority.issue("localhost")
    with RedisServer() as server, Front(certificate, key, server.port) as front:
        configure(REDIS=f"rediss://localhost:{front.port}/0?ssl_ca_certs={authority.certificate}")
        worker = start()
        worker.wait_for("Loaded Redis")
        message = wait_until(schedule_message("t.tx", delay=0.2), State.CONSUMED)
        assert log_of(message)[1].ready_at is not None
        assert worker.stop() == 0
    assert worker.count("Redis is away") == 0


@pytest.mark.parametrize(("issuer", "host"), [("ours", "elsewhere"), ("a stranger", "localhost")])
def test_with_a_certificate_that_is_refused_delivery_goes_on_from_the_database(
    start: Start, configure: Configure, authority: Authority, tmp_path: Path, issuer: str, host: str
) -> None:
    certificate, key = (authority if issuer == "ours" else Authority(tmp_path, issuer)).issue(host)
    with RedisServer() as server, Front(certificate, key, server.port) as front:
        configure(REDIS=f"rediss://localhost:{front.port}/0?ssl_ca_certs={authority.certificate}")
        worker = start()
        worker.wait_for("Redis is away.*certificate verify failed")
        wait_until(schedule_message("t.tx"), State.CONSUMED)
        worker.stop()
        with redis.Redis(port=server.port) as client:
            assert client.dbsize() == 0
