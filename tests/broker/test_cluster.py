"""How a broker finds the node of a Redis Cluster that has its ids."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from django_delayq.broker.redis import RedisBroker
from django_delayq.core.exceptions import BrokerFailing, BrokerUnavailable
from django_delayq.project import conf
from tests.support.redis_cluster import Node, RedisCluster, lone_node
from tests.support.tls import OPENSSL, Authority, Front
from tests.support.workers import PATIENCE, eventually

Make = Callable[..., RedisBroker]


@pytest.fixture
def make() -> Iterator[Make]:
    with contextlib.ExitStack() as stack:

        def broker(place: str, using: str = "default", **settings: Any) -> RedisBroker:
            given, problems = conf.parse({"REDIS": place, **settings})
            assert not problems
            return stack.enter_context(contextlib.closing(RedisBroker(given, using, timeout=PATIENCE)))

        yield broker


@pytest.fixture(scope="module")
def lone() -> Iterator[Node]:
    """A cluster of one node."""
    with lone_node() as server:
        yield server


def test_two_aliases_have_two_hash_slots(make: Make, lone: Node) -> None:
    brokers = [make(f"redis+cluster://{lone.address}", using) for using in ("default", "other")]
    assert all(broker.tick().tick > 0 for broker in brokers)
    first, second = (lone.ask("CLUSTER", "KEYSLOT", broker.keys("").meta) for broker in brokers)
    found = [broker.server_info().hash_slot for broker in brokers]
    assert [each and each.number for each in found] == [first, second]
    assert first != second


def test_any_node_leads_to_the_owner(make: Make) -> None:
    with RedisCluster() as cluster:
        owner, replicas = cluster.place()
        for each in cluster.nodes:
            for place in (f"redis+cluster://{each.address}", f"redis://{each.address}/0"):
                broker = make(place)
                if place.startswith("redis://") and each is not owner:
                    with pytest.raises(BrokerUnavailable, match=f"was moved from {each.address} to {owner.address}"):
                        broker.tick()
                assert broker.tick().tick > 0
                found = broker.server_info().hash_slot
                assert found is not None
                assert (found.owner, found.replicas) == (owner.address, tuple(one.address for one in replicas))


def test_nodes_that_tell_other_addresses_are_reached_by_the_map(make: Make, lone: Node) -> None:
    told = f"10.255.255.1:{lone.port}"
    lone.ask("CONFIG", "SET", "cluster-announce-ip", "10.255.255.1")
    try:
        eventually(lambda: lone.ask("CLUSTER", "SLOTS")[0][2][0] == "10.255.255.1")
        broker = make(f"redis+cluster://{lone.address}", REDIS_ADDRESS_MAP={told: lone.address})
        assert broker.tick().tick > 0
        found = broker.server_info().hash_slot
        assert found is not None
        assert found.owner == lone.address
    finally:
        lone.ask("CONFIG", "SET", "cluster-announce-ip", "127.0.0.1")
        eventually(lambda: lone.ask("CLUSTER", "SLOTS")[0][2][0] == "127.0.0.1")


@pytest.mark.skipif(OPENSSL is None, reason="needs the openssl program, to make certificates")
def test_nodes_are_asked_over_tls_with_the_user_of_the_url(
    make: Make, lone: Node, tmp_path_factory: pytest.TempPathFactory
) -> None:
    authority = Authority(tmp_path_factory.mktemp("tls"), "ours")
    certificate, key = authority.issue("localhost")
    rights = "+hmget +hincrby +info +cluster|info +cluster|slots"
    lone.ask("ACL", "SETUSER", "delayq", "on", ">a,b", "~{delayq*", "nocommands", *rights.split())
    with Front(certificate, key, lone.port) as front:
        query = f"ssl_ca_certs={authority.certificate}"
        reached = {lone.address: f"localhost:{front.port}"}
        place = f"rediss+cluster://delayq:a%2Cb@localhost:1,localhost:{front.port}/0?{query}"
        broker = make(place, REDIS_ADDRESS_MAP=reached)
        assert broker.tick().tick > 0
        assert broker.cluster.owner == ("localhost", front.port)
        wrong = make(place.replace("a%2Cb", "c"), REDIS_ADDRESS_MAP=reached)
        with pytest.raises(BrokerFailing, match=r"username-password|WRONGPASS"):
            wrong.tick()


def test_a_user_who_may_not_ask_for_the_nodes_is_told_so(make: Make, lone: Node) -> None:
    lone.ask("ACL", "SETUSER", "narrow", "on", ">secret", "~{delayq*", "nocommands", "+hmget", "+hincrby")
    with pytest.raises(BrokerFailing, match=r"permissions|NOPERM"):
        make(f"redis+cluster://narrow:secret@{lone.address}").tick()


@pytest.mark.parametrize(
    "wrong", [{"10.0.0.5": "h:1"}, {"10.0.0.5:1": "h"}, {"10.0.0.5:1": None}, ["10.0.0.5:1"], {1: 2}], ids=str
)
def test_an_impossible_map_of_addresses_is_refused(wrong: Any) -> None:
    _settings, problems = conf.parse({"REDIS_ADDRESS_MAP": wrong})
    assert ["dict of addresses" in problem.hint for problem in problems] == [True]
