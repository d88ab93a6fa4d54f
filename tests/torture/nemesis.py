"""The nemesis: causes one fault after another by a seeded plan, and notes the time and the victims of each."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg
import redis

from tests.support.proxy import Proxy
from tests.support.redis_cluster import RedisCluster
from tests.support.workers import eventually
from tests.torture.arena import Arena, Process, signal_all
from tests.torture.callers import DID_NOTHING
from tests.torture.full_disk import FillablePostgres
from tests.torture.sizes import DELAYQ

LEASE = float(DELAYQ["LEASE"])
# Half of all connections but the one that runs this.
END_SOME = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
 WHERE backend_type = 'client backend' AND application_name <> 'nemesis' AND pid <> pg_backend_pid() AND random() < 0.5
"""
HELD_BACK = "SELECT age(backend_xmin) FROM pg_stat_activity WHERE pid = pg_backend_pid()"
LEVELS = ("READ_COMMITTED", "REPEATABLE_READ", "SERIALIZABLE")
# All kinds of faults, in the order from which the seed shuffles them.
FAULTS = """
kill-child kill-worker kill-all kill-supervisor kill-producer freeze-child freeze-worker roll isolation restores
rivals flush drop-key lost-reply redis-empty redis-rollback redis-aof-cut redis-blackhole redis-half-open
redis-failover redis-failover-paused redis-freeze redis-cut redis-evict clock database-fast database-immediate
database-kill database-cut database-blackhole database-half-open database-full held-snapshot disk-full pooler
table-lock long-locks key-actions unread-log redis-unresolved database-read-only small-pool freeze-limited
"""
# Those of Redis that are called otherwise.
OF_REDIS = ("clock", "drop-key", "flush", "lost-reply")
# Instead of those of Redis, where that is a cluster.
OF_CLUSTER = """
redis-owner-killed redis-owner-frozen redis-owner-apart redis-owner-handed redis-slot-moved redis-masters-away
redis-nodes-moved redis-password
"""
# Seconds that callers go on who act on keys, and who ask for more time.
ACTING, EXTENDING = 12, 12
# No log is read for so many seconds at least: a lease runs out meanwhile that nobody renews, and is taken for lost.
UNREAD = 15.0
# A name is looked up in vain for so many seconds at least, for the one who waits to be told from a busy machine.
UNRESOLVED = 5.0


def kinds_of(*, is_cluster: bool) -> list[str]:
    """Return the kinds of faults, of a single Redis or of a cluster."""
    kinds = FAULTS.split()
    if not is_cluster:
        return kinds
    return [kind for kind in kinds if not kind.startswith("redis-") and kind not in OF_REDIS] + OF_CLUSTER.split()


def _try_until(look: Callable[[], int]) -> int:
    """Look until it returns something true, or for ten seconds; return what it returned, or 0."""
    try:
        return eventually(look, timeout=10)
    except AssertionError:
        return 0


class Nemesis:
    """Has a method for each kind of fault, which returns when the fault is healed or its healing is under way."""

    def __init__(self, arena: Arena, seed: str, only: Sequence[str] = ()) -> None:
        self.arena = arena
        self.random = random.Random(f"{seed} nemesis")
        self.journal = arena.journal
        self._number = 0
        self._lock = threading.Lock()
        self._thawing: list[threading.Thread] = []
        # Callers at work, by the kind of fault.
        self._calling: dict[str, threading.Thread] = {}
        kinds = kinds_of(is_cluster=arena.cluster is not None)
        if unknown := set(only) - {*kinds}:
            raise SystemExit(f"no such fault: {', '.join(sorted(unknown))}")
        for kind, lack in arena.lacks.items():
            print(f"{kind} is left out: {lack}", flush=True)
        self.faults: dict[str, Callable[[], None]] = {
            kind: getattr(self, kind.replace("-", "_"))
            for kind in kinds
            if not arena.is_without(kind) and (kind in only or not only)
        }

    def plan(self) -> Iterator[str]:
        """Yield every kind as often as its weight says, in a random order, and then again without end."""
        weights = self.arena.size.weights
        while True:
            kinds = [kind for kind in self.faults for _time in range(weights.get(kind, 1))]
            self.random.shuffle(kinds)
            yield from kinds

    def run(self, until: float) -> None:
        low, high = self.arena.size.rest
        for kind in self.plan():
            if time.time() > until:
                break
            self.faults[kind]()
            self.arena.rest(self.random.uniform(low, high))
        self._all_thawed()
        for kind in self._calling:
            self._all_called(kind)

    def _all_thawed(self) -> None:
        for thread in self._thawing:
            thread.join()
        self._thawing.clear()

    @contextmanager
    def fault(self, kind: str, **facts: Any) -> Iterator[dict[str, Any]]:
        """Note when a fault begins and when it is healed. What the block puts into the dict is noted with the end."""
        with self._lock:
            self._number += 1
            number = self._number
        self.journal.write("begin", fault=number, kind=kind, **facts)
        more: dict[str, Any] = {}
        yield more
        self.journal.write("end", fault=number, kind=kind, **more)
        if not more.get("bite", True):
            self.journal.write("toothless fault", text=f"{kind}: {more}")

    # --- processes ----------------------------------------------------------------------------------------------------

    def a_worker(self) -> Process:
        return self.random.choice(self.arena.workers)

    def a_child(self) -> int:
        """Wait for a child of some worker and return its pid: a worker that has just been started may have none yet."""
        return self.random.choice(eventually(lambda: self.a_worker().pids[1:], "a worker has a child"))

    def kill_child(self) -> None:
        pids = [self.a_child()]
        with self.fault("kill-child", pids=pids):
            signal_all(pids, signal.SIGKILL)

    def kill_worker(self) -> None:
        self._kill("kill-worker", [self.a_worker()])

    def kill_all(self) -> None:
        """Kill every worker at once, with all that they run, as a power cut of the whole site does."""
        self._kill("kill-all", [*self.arena.workers])
        # A fault of the network would find no connection.
        eventually(lambda: all(way.is_used for way in self.arena.to_postgres[1:]), "all workers are back")

    def _kill(self, kind: str, workers: list[Process]) -> None:
        with self.fault(kind, pids=[pid for worker in workers for pid in worker.pids]) as more:
            more["pids"] = [pid for worker in workers for pid in worker.pids]
            for worker in workers:
                worker.kill()
            for worker in workers:
                self.arena.replace(worker)

    def kill_supervisor(self) -> None:
        """Kill a supervisor; its children notice, and end in order."""
        worker = self.a_worker()
        children = worker.pids[1:]
        with self.fault("kill-supervisor"):
            os.kill(worker.popen.pid, signal.SIGKILL)
            worker.popen.wait()
            self.arena.replace(worker)
            self.arena.orphans += children

    def kill_producer(self) -> None:
        number = self.random.randrange(self.arena.size.producers)
        producer = self.arena.others[f"producer {number}"]
        with self.fault("kill-producer", pids=producer.pids):
            producer.kill()
            self.arena.start_producer(number)

    def freeze_child(self) -> None:
        self._freeze("freeze-child", [self.a_child()])

    def freeze_worker(self) -> None:
        self._freeze("freeze-worker", self.a_worker().pids)

    def _freeze(self, kind: str, pids: list[int]) -> None:
        """Freeze processes for longer than the lease, while other faults go on."""
        span = LEASE + self.random.uniform(0.5, 4)

        def thaw() -> None:
            with self.fault(kind, pids=pids):
                signal_all(pids, signal.SIGSTOP)
                time.sleep(span)
                signal_all(pids, signal.SIGCONT)

        thread = threading.Thread(target=thaw, daemon=True)
        thread.start()
        self._thawing.append(thread)

    def roll(self) -> None:
        """Deploy: end every worker in order, each after the successor of the one before is there."""
        # Frozen workers end late, and when all of them are frozen nothing is delivered.
        self._all_thawed()
        with self.fault("roll"):
            self._roll()

    def isolation(self) -> None:
        """Roll all workers, so that each has another isolation level; producers follow when they are started again."""
        self._all_thawed()
        with self.fault("isolation") as more:
            for place in range(1 + len(self.arena.workers)):
                self.arena.isolation[place] = self.random.choice(LEVELS)
            more["levels"] = self.arena.isolation
            self._roll()

    def _roll(self) -> None:
        for worker in list(self.arena.workers):
            self._end(worker)

    def _end(self, worker: Process) -> None:
        """End a worker in order, and start another one in its place."""
        worker.popen.terminate()
        try:
            worker.popen.wait(60)
        except subprocess.TimeoutExpired:
            self.journal.write("worker ended by itself", text=f"{worker.name} does not end")
        self.arena.replace(worker).wait_until_there()

    def restores(self) -> None:
        """Run two restores at once."""
        with self.fault("restores") as more:
            pair = [self.arena.restore() for _ in range(2)]
            more["code"] = max(process.popen.wait(60) for process in pair)

    def rivals(self) -> None:
        """Requeue and purge the same dead messages at once."""
        with self.fault("rivals") as more:
            more["code"] = self.arena.client("rivals", str(self.random.random())).popen.wait(60)

    # --- callers ------------------------------------------------------------------------------------------------------

    def long_locks(self) -> None:
        """Have transactions lock messages that run, while other faults go on."""
        self._have_called("long-locks", "locks", LEASE)

    def key_actions(self) -> None:
        """Have others act on chains by their keys, while other faults go on."""
        self._have_called("key-actions", "keys", ACTING, way=self.arena.from_afar)

    def _have_called(self, kind: str, what: str, seconds: float, way: Proxy | None = None) -> None:
        seed = str(self.random.random())
        self._all_called(kind)

        def call() -> None:
            with self.fault(kind) as more:
                self._wait_for(self.arena.client("callers", what, seed, str(seconds), way=way), more)

        self._calling[kind] = threading.Thread(target=call, daemon=True)
        self._calling[kind].start()

    def _all_called(self, kind: str) -> None:
        while kind in self._calling and self._calling[kind].is_alive():
            self.arena.rest(0.2)

    def _wait_for(self, callers: Process, more: dict[str, Any]) -> None:
        """Wait for the end of callers, and note how they ended."""
        code = callers.popen.wait(120)
        more["bite"] = code != DID_NOTHING
        more["code"] = code if more["bite"] else 0

    def freeze_limited(self) -> None:
        """Freeze the holder of the only place of a limit, until its message is delivered again and others wait."""
        callers = self.arena.client("callers", "single", str(self.random.random()), "90")
        # A second later its handler has surely begun. It is over when its process goes on.
        first = eventually(lambda: self.arena.running("torture.single"), "the message runs")
        self.arena.rest(1)
        pids = [message.pid for message in self.arena.running("torture.single") if message in first]
        with self.fault("freeze-limited", pids=pids) as more:
            signal_all(pids, signal.SIGSTOP)
            while callers.alive:
                self.arena.rest(0.2)
            signal_all(pids, signal.SIGCONT)
            self._wait_for(callers, more)

    def unread_log(self) -> None:
        """Read nothing for a while of what a worker logs, and end it in order before anybody reads again."""
        self._all_thawed()
        worker = self.a_worker()
        assert worker.reader is not None
        with self.fault("unread-log") as more:
            worker.reader.pause()
            self.arena.rest(UNREAD + self.random.uniform(0, 4))
            more["bite"] = worker.reader.is_full or not worker.alive
        if worker in self.arena.workers:
            with self.fault("roll"):
                self._end(worker)
        worker.reader.go_on()

    # --- Redis --------------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        with self.fault("flush"), self.arena.redis_client() as client:
            client.flushall()

    def drop_key(self) -> None:
        with self.fault("drop-key") as more, self.arena.redis_client() as client:
            keys = sorted(client.keys("*"))
            key = self.random.choice(keys) if keys else b""
            more["key"], more["bite"] = key.decode(), client.delete(key)

    def lost_reply(self) -> None:
        """Lose the replies to the next scripts, which are carried out."""
        way = self.random.choice(self.arena.to_redis)
        with self.fault("lost-reply") as more:
            before, number = len(way.lost), self.random.randint(1, 4)
            way.lose_reply_to(*[b"EVALSHA"] * number)
            _try_until(lambda: len(way.lost) == before + number)
            more["bite"] = len(way.lost) - before

    def redis_empty(self) -> None:
        with self.fault("redis-empty"):
            self.arena.load_redis(None)

    def redis_rollback(self) -> None:
        older = self.arena.snapshot()
        self.arena.rest(self.random.uniform(0.5, 4))
        with self.fault("redis-rollback"):
            self.arena.load_redis(older)

    def redis_aof_cut(self) -> None:
        """Restart Redis on a log whose last seconds never reached the disk."""
        log = self.arena.keep_redis_log()
        self.arena.rest(self.random.uniform(0.5, 3))
        with self.fault("redis-aof-cut"):
            self.arena.cut_redis_log(log, self.random.uniform(0.1, 0.9))

    def redis_failover(self) -> None:
        """Fail over to a replica that has received nothing for a while."""
        self._let_the_replica_lag()
        with self.fault("redis-failover") as more:
            more["bite"] = self.arena.fail_over()

    def redis_failover_paused(self) -> None:
        """Fail over while a producer stands still: it has put what the new master never heard of, and goes on late."""
        self._let_the_replica_lag()
        producer = self.random.choice([self.arena.others[name] for name in self.arena.others if "producer" in name])
        pids = producer.pids
        with self.fault("redis-failover-paused") as more:
            signal_all(pids, signal.SIGSTOP)
            more["bite"] = self.arena.fail_over()
            self.arena.rest(self.random.uniform(0.5, 3))
            signal_all(pids, signal.SIGCONT)

    def _let_the_replica_lag(self) -> None:
        with self.arena.replica_client() as client:
            _try_until(lambda: client.info("replication").get("master_link_status") == "up")
        self.arena.note_slow_scripts()
        self.arena.to_master.swallow()
        self.arena.rest(self.random.uniform(0.5, 3))

    def redis_freeze(self) -> None:
        with self.fault("redis-freeze"):
            self.arena.redis.freeze()
            time.sleep(self.random.uniform(1, 4))
            self.arena.redis.thaw()

    def redis_cut(self) -> None:
        with self.fault("redis-cut"):
            for way in self.ways(self.arena.to_redis):
                way.cut()

    def redis_blackhole(self) -> None:
        """Hold back all data between processes and Redis in both directions, without an error."""
        with self.fault("redis-blackhole"):
            self._swallow(self.ways(self.arena.to_redis))

    def redis_half_open(self) -> None:
        """Silence the present connections, as a firewall does that has forgotten them. New ones work."""
        with self.fault("redis-half-open") as more:
            more["bite"] = self._forget(self.ways(self.arena.to_redis))

    # --- a Redis Cluster ----------------------------------------------------------------------------------------------

    @property
    def cluster(self) -> RedisCluster:
        assert self.arena.cluster is not None
        return self.arena.cluster

    def _suffer(self) -> None:
        """Let some time pass in which the cluster has time to choose another owner, or has not."""
        time.sleep(self.random.uniform(0.5, 6))

    def redis_owner_killed(self) -> None:
        with self.fault("redis-owner-killed"):
            owner = self.cluster.owner()
            owner.kill()
            self._suffer()
            owner.start()
            self.cluster.wait_until_ready()

    def redis_owner_frozen(self) -> None:
        with self.fault("redis-owner-frozen"):
            owner = self.cluster.owner()
            owner.freeze()
            self._suffer()
            owner.thaw()
            self.cluster.wait_until_ready()

    def redis_owner_apart(self) -> None:
        """Part the owner from the other nodes, while its clients reach it."""
        with self.fault("redis-owner-apart"):
            self.cluster.cut_off(self.cluster.owner())
            self._suffer()
            self.cluster.heal()
            self.cluster.wait_until_ready()

    def redis_owner_handed(self) -> None:
        """Have a replica take over in order."""
        with self.fault("redis-owner-handed") as more:
            owner, replicas = self.cluster.place()
            replicas[0].ask("CLUSTER", "FAILOVER")
            more["bite"] = _try_until(lambda: self.cluster.owner() is not owner)
            self.cluster.wait_until_ready()

    def redis_slot_moved(self) -> None:
        """Move the slot of the keys, one by one."""
        with self.fault("redis-slot-moved"):
            for _left in self.cluster.moving():
                time.sleep(self.random.uniform(0, 0.3))

    def redis_masters_away(self) -> None:
        """Kill all masters at once: no replica can take over."""
        with self.fault("redis-masters-away"):
            masters = self.cluster.masters()
            for master in masters:
                master.kill()
            self._suffer()
            for master in masters:
                master.start()
            self.cluster.wait_until_ready()

    def redis_nodes_moved(self) -> None:
        """Have two nodes come back at other addresses, the owner among them. The settings name the others."""
        with self.fault("redis-nodes-moved"):
            owner = self.cluster.owner()
            for node in (owner, self.cluster.nodes[-1]):
                node.move()
                self.cluster.wait_until_ready()

    def redis_password(self) -> None:
        """Have the nodes want another password for a while."""
        with self.fault("redis-password"):
            self.cluster.set_password("other")
            self._suffer()
            self.cluster.set_password("")
            self.cluster.wait_until_ready()

    def ways(self, network: list[Proxy]) -> list[Proxy]:
        """Return all proxies, or that of one worker, while the others go on."""
        return network if self.random.random() < 0.5 else [self.random.choice(network[1:])]

    def _swallow(self, ways: list[Proxy]) -> None:
        for way in ways:
            way.swallow()
        try:
            self.arena.rest(self.random.uniform(*self.arena.size.partition))
        finally:
            for way in ways:
                way.clear()

    def _forget(self, ways: list[Proxy]) -> int:
        # A worker that was killed a moment ago has no connections yet.
        forgotten = _try_until(lambda: sum(way.forget() for way in ways))
        self.arena.rest(self.random.uniform(*self.arena.size.partition))
        for way in ways:
            way.reset_forgotten()
        return forgotten

    def redis_evict(self) -> None:
        """Make memory short, so that any key may be evicted."""
        with self.fault("redis-evict") as more, self.arena.redis_client() as client:
            before = client.info("stats")["evicted_keys"]

            def look() -> bool:
                # Memory that other clients have used meanwhile counts too.
                client.config_set("maxmemory", client.info("memory")["used_memory"] - 1)
                more["bite"] = client.info("stats")["evicted_keys"] - before
                return bool(more["bite"])

            client.config_set("maxmemory-policy", "allkeys-random")
            _try_until(look)
            client.config_set("maxmemory", 0)
            client.config_set("maxmemory-policy", "noeviction")

    def clock(self) -> None:
        """Set the clock of Redis far ahead or back, and after a while right again."""
        ahead = self.random.choice((-3600, -30, -2, 2, 30, 3600))
        with self.fault("clock", ahead=ahead) as more:
            self.arena.set_redis_clock(ahead)
            self.arena.rest(self.random.uniform(*self.arena.size.partition))
            with contextlib.suppress(redis.RedisError), self.arena.redis_client() as client:
                more["bite"] = abs(client.time()[0] - time.time()) > 1
            self.arena.set_redis_clock(0)

    def redis_unresolved(self) -> None:
        """Have the name server fall silent, and break the connections to Redis."""
        with self.fault("redis-unresolved") as more:
            self.arena.silent.touch()
            for way in self.arena.to_redis:
                way.cut()
            self.arena.rest(UNRESOLVED + self.random.uniform(0, 5))
            more["bite"] = not any(way.is_used for way in self.arena.to_redis)
            self.arena.silent.unlink()

    # --- the database -------------------------------------------------------------------------------------------------

    def database_fast(self) -> None:
        with self.fault("database-fast"):
            self.arena.postgres.restart()

    def database_immediate(self) -> None:
        with self.fault("database-immediate"):
            self.arena.postgres.kill()
            self.arena.postgres.start()

    def database_kill(self) -> None:
        with self.fault("database-kill"):
            self.arena.kill_postgres()
            self.arena.postgres.start()

    def database_cut(self) -> None:
        """Break every connection, on both sides or only for the client."""
        with self.fault("database-cut"):
            if self.random.random() < 0.5:
                for way in self.ways(self.arena.to_postgres):
                    way.cut()
            else:
                with psycopg.connect(self.arena.postgres.url, autocommit=True) as connection:
                    connection.execute(
                        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                        "WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
                    )

    def database_blackhole(self) -> None:
        with self.fault("database-blackhole"):
            self._swallow(self.ways(self.arena.to_postgres))

    def database_half_open(self) -> None:
        """Silence the present connections as with Redis. The kernel's keepalives are there to end them."""
        with self.fault("database-half-open") as more:
            more["bite"] = self._forget(self.ways(self.arena.to_postgres))

    def database_full(self) -> None:
        """End connections and take their places, until no more are free. Who comes back is refused for a while."""
        url = self.arena.postgres.url
        with self.fault("database-full") as more, contextlib.ExitStack() as stack:
            more["bite"] = 0
            first = stack.enter_context(psycopg.connect(url, autocommit=True))
            until = time.monotonic() + self.random.uniform(*self.arena.size.partition)
            ended = False
            while time.monotonic() < until:
                try:
                    stack.enter_context(psycopg.connect(url, application_name="nemesis"))
                except psycopg.OperationalError:
                    if not ended:
                        ended = True
                        first.execute(END_SOME)
                    else:
                        more["bite"] += 1
                        self.arena.rest(0.1)

    def held_snapshot(self) -> None:
        """Keep a transaction open, as a long report does: no row that leaves is removed meanwhile. Nobody is late."""
        with self.fault("held-snapshot") as more, psycopg.connect(self.arena.postgres.url) as connection:
            connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            connection.execute("SELECT count(*) FROM delayq_message")
            self.arena.rest(self.random.uniform(*self.arena.size.partition))
            # The number of transactions whose dead rows stay because of this one.
            [more["bite"]] = connection.execute(HELD_BACK).fetchone() or [0]

    def disk_full(self) -> None:
        """Let no file of the database grow for a while. One that cannot write its log ends, and is started again."""
        postgres = self.arena.postgres
        assert isinstance(postgres, FillablePostgres)
        with self.fault("disk-full") as more:
            postgres.fill()
            self.arena.rest(self.random.uniform(*self.arena.size.partition))
            try:
                with psycopg.connect(postgres.url) as connection:
                    connection.execute("CREATE TEMP TABLE big AS SELECT * FROM generate_series(1, 10000)")
                more["bite"] = False
            except psycopg.OperationalError as error:
                more["bite"] = str(error)
            postgres.empty()
            postgres.start()
            eventually(postgres.answers, "PostgreSQL is back")

    def pooler(self) -> None:
        """Put a pooler between some processes and the database, or take it away again."""
        with self.fault("pooler"):
            for way in self.ways(self.arena.to_postgres):
                self.arena.turn_pooler(way)

    def table_lock(self) -> None:
        """Lock the table of messages for longer than a lease, as a migration or ``VACUUM FULL`` does."""
        with self.fault("table-lock"), psycopg.connect(self.arena.postgres.url) as connection:
            connection.execute("LOCK TABLE delayq_message IN ACCESS EXCLUSIVE MODE")
            self.arena.rest(LEASE + self.random.uniform(1, 5))

    def database_read_only(self) -> None:
        """Have new sessions take no writes for a while, as after a failover: those stay read-only until they end."""
        self.arena.leave_pooler()
        with psycopg.connect(self.arena.postgres.url, autocommit=True) as connection, self.fault("database-read-only"):
            connection.execute(f"ALTER ROLE {self.arena.postgres.user} SET default_transaction_read_only = on")
            for way in self.ways(self.arena.to_postgres):
                way.cut()
            self.arena.rest(self.random.uniform(*self.arena.size.partition))
            connection.execute(f"ALTER ROLE {self.arena.postgres.user} RESET default_transaction_read_only")

    def small_pool(self) -> None:
        """Put a worker behind a pooler of few connections, while handlers ask for more time in their transactions."""
        self.arena.leave_pooler()
        way = self.random.choice(self.arena.to_postgres[1:])
        with self.fault("small-pool") as more:
            way.turn_to(self.arena.small_pool.port)
            callers = self.arena.client("callers", "extends", str(self.random.random()), str(EXTENDING))
            self.arena.rest(EXTENDING + 4)
            self._wait_for(callers, more)
            way.turn_to(self.arena.postgres.port)
