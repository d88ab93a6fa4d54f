"""The floor of Redis alone: payload and due time by one script a call. Nothing is on disk."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import redis

MESSAGES_PER_CALL = 100
client = redis.Redis.from_url(os.environ["REDIS_URL"])
put = client.register_script("""
for i = 1, #ARGV, 3 do
  redis.call("HSET", KEYS[2], ARGV[i], ARGV[i + 2])
  redis.call("ZADD", KEYS[1], ARGV[i + 1], ARGV[i])
end
return 1
""")
take = client.register_script("""
local ids = redis.call("ZRANGEBYSCORE", KEYS[1], "-inf", ARGV[1], "LIMIT", 0, ARGV[2])
if #ids == 0 then return {} end
local payloads = redis.call("HMGET", KEYS[2], unpack(ids))
redis.call("ZREM", KEYS[1], unpack(ids))
redis.call("HDEL", KEYS[2], unpack(ids))
return payloads
""")
KEYS = ["{floor}:due", "{floor}:payload"]


def _put(payloads: list[dict[str, Any]], due: float | None) -> None:
    score = int((due or time.time()) * 1000)
    put(keys=KEYS, args=[value for payload in payloads for value in (payload["n"], score, json.dumps(payload))])


def send(payload: dict[str, Any], due: float | None) -> None:
    _put([payload], due)


def send_many(payloads: list[dict[str, Any]], due: float | None) -> None:
    for start in range(0, len(payloads), MESSAGES_PER_CALL):
        _put(payloads[start : start + MESSAGES_PER_CALL], due)


def drain(number: int) -> float:
    """Take due messages, a hundred a call, and return the seconds."""
    began, taken = time.perf_counter(), 0
    while taken < number:
        found = take(keys=KEYS, args=[int(time.time() * 1000), MESSAGES_PER_CALL])
        taken += len([json.loads(one) for one in found])
    return time.perf_counter() - began
