"""Scripts are read, checked and sent. The keys of a script share one slot."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot

from django_delayq.broker import scripts
from django_delayq.broker.keys import keys, namespace
from django_delayq.core import values
from django_delayq.core.exceptions import InvalidMessage
from django_delayq.project import conf, validation

from .bench import Bench


@pytest.mark.parametrize("values", [{}, {"upto": 2, "lise": 3}, {"upto": 2, "lease": 3, "rest": [1]}], ids=str)
def test_a_wrong_argument_is_a_type_error(redis_client: redis.Redis, values: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="script loaded takes"):
        scripts.load("loaded")(redis_client, keys("p", "q"), now=1, worker="w", **values)
    assert not redis_client.keys()


@pytest.mark.parametrize(
    "source",
    ["local a, b = KEYS[1], KEYS[3]\n", "local a = KEYS[2]\n", "local a, b = ARGV[1], ARGV[3]\n"],
)
def test_a_signature_that_leaves_a_parameter_out_is_refused(source: str) -> None:
    with pytest.raises(ValueError, match="one by one"):
        scripts._signature(source)


def test_a_script_is_sent_in_full_only_once(bench: Bench) -> None:
    bench.client.script_flush()
    bench.client.config_resetstat()
    for _ in range(5):
        bench.call("notify")
    stats = bench.client.info("commandstats")
    assert stats["cmdstat_eval"]["calls"] == 1


words = st.from_regex(values.WORD, fullmatch=True)


@given(words, words, words)
def test_the_keys_of_a_queue_share_one_slot_and_are_its_own(prefix: str, queue: str, other: str) -> None:
    prefix, queue, other = prefix[:40], queue[:64], other[:64]
    validation.queue(queue)
    assert not conf.parse({"PREFIX": prefix})[1]
    names = astuple(keys(prefix, queue))
    assert len(set(names)) == len(names) == 10
    assert len({key_slot(name.encode()) for name in names}) == 1
    assert keys(prefix, queue).queue == queue
    assert keys(namespace(prefix, "other"), queue) != keys(namespace(prefix, "default"), queue)
    if queue != other:
        assert keys(prefix, queue) != keys(prefix, other)
        assert keys(queue, prefix) != keys(other, prefix)


@pytest.mark.parametrize("name", ["a}b", "{a", "a{}", "{}", "a'b", 'a"b', "a b", "a:b", "a\r\nb", "a@b"])
def test_a_name_that_could_break_the_hash_tag_is_no_queue_and_no_prefix(name: str) -> None:
    with pytest.raises(InvalidMessage):
        validation.queue(name)
    assert [problem.id for problem in conf.parse({"PREFIX": name})[1]] == ["E003"]
