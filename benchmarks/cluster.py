"""Measures how late messages are while a Redis Cluster suffers faults: ``python -m benchmarks.cluster [--rounds 3]``.

For each fault a new cluster of 3 + 3 nodes, one worker, and a hundred messages a second that are due within two
seconds. The fault comes after four seconds, and is healed six seconds later. Prints the latest start (s), and how many
messages were lost, delivered twice or early. ``--only killed --program /path/to/valkey-server``.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections.abc import Callable

from tests.support.redis_cluster import RedisCluster

from .own_servers import servers, set_up_django

PACE = 0.01
# Seconds after the first message, and the number of them in all.
FAULT_AT, HEALED_AT, ENDS_AT = 4.0, 10.0, 16.0

Act = Callable[[RedisCluster], object]


def killed(cluster: RedisCluster) -> Act:
    owner = cluster.owner()
    owner.kill()
    return lambda _cluster: owner.start()


def frozen(cluster: RedisCluster) -> Act:
    owner = cluster.owner()
    owner.freeze()
    return lambda _cluster: owner.thaw()


def failover(cluster: RedisCluster) -> Act:
    cluster.place()[1][0].ask("CLUSTER", "FAILOVER")
    return lambda cluster: cluster.place()[1][0].ask("CLUSTER", "FAILOVER")


def moved(cluster: RedisCluster) -> Act:
    for _left in cluster.moving():
        time.sleep(0.2)
    return lambda cluster: [*cluster.moving()]


def apart(cluster: RedisCluster) -> Act:
    cluster.cut_off(cluster.owner())
    return lambda cluster: cluster.heal()


def masters(cluster: RedisCluster) -> Act:
    found = cluster.masters()
    for master in found:
        master.kill()

    def heal(_cluster: RedisCluster) -> None:
        for master in found:
            master.start()

    return heal


def addresses(cluster: RedisCluster) -> Act:
    owner = cluster.owner()
    owner.move()
    return lambda cluster: cluster.owner().move()


def password(cluster: RedisCluster) -> Act:
    cluster.set_password("new")
    return lambda cluster: cluster.set_password("")


FAULTS = {act.__name__: act for act in (killed, frozen, failover, moved, apart, masters, addresses, password)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=FAULTS, nargs="+", default=[*FAULTS])
    parser.add_argument("--program", help="another redis-server or valkey-server")
    arguments = parser.parse_args()
    with servers() as (_redis, postgres):
        names = {"DJANGO_SETTINGS_MODULE": "benchmarks.settings", "DATABASE_URL": postgres.url, "DEBUG": "0"}
        os.environ.update(names, REDIS_URL="")
        set_up_django()
        for name in arguments.only:
            for _round in range(arguments.rounds):
                with RedisCluster(program=arguments.program) as cluster:
                    print(f"{name:10} {measure(cluster, FAULTS[name])}", flush=True)


def measure(cluster: RedisCluster, fault: Callable[[RedisCluster], Act]) -> str:
    """Schedule messages while the cluster suffers, and return what came of them."""
    from django.conf import settings
    from django.test import override_settings

    from django_delayq import schedule_message
    from django_delayq.models import Message, Transition

    from .recovery import starts, until, worker

    ids: list[int] = []
    os.environ["BENCH_REDIS"] = cluster.url
    with override_settings(DELAYQ={**settings.DELAYQ, "REDIS": cluster.url}), worker("--processes", "1", "-v", "1"):
        time.sleep(2.0)
        began = time.monotonic()
        suffering = threading.Thread(target=_suffer, args=(cluster, fault, began))
        suffering.start()
        while time.monotonic() < began + ENDS_AT:
            ids.append(schedule_message("bench.noop", delay=len(ids) % 20 / 10).pk)
            time.sleep(max(0.0, began + len(ids) * PACE - time.monotonic()))
        suffering.join()
        until(lambda: not Message.objects.exclude(state="consumed").exists())
        found = starts(ids)
        claims = Transition.objects.filter(message_id__in=ids, to_state="running")
        by_redis = claims.exclude(ready_at=None).count()
        # A worker claims a moment ahead; the time when the id is ready says when it begins.
        early = sum((claim.ready_at or claim.at) < claim.due_at for claim in claims)
    twice = sum(len(times) > 1 for times in found.values())
    latest = max(max(times) for times in found.values())
    lost = len(ids) - len(found)
    return f"{len(ids)} messages, {by_redis} by Redis: latest {latest:.2f} s; lost {lost}, twice {twice}, early {early}"


def _suffer(cluster: RedisCluster, fault: Callable[[RedisCluster], Act], began: float) -> None:
    time.sleep(max(0.0, began + FAULT_AT - time.monotonic()))
    heal = fault(cluster)
    time.sleep(max(0.0, began + HEALED_AT - time.monotonic()))
    heal(cluster)


if __name__ == "__main__":
    main()
