"""A Redis Cluster of a test's own: three masters, each with a replica."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import redis
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

from testproject.servers import RedisServer, ServerFailed
from tests.support.workers import eventually

MASTERS = 3
# A node that does not answer for this long has failed: its replica takes over. Milliseconds.
NODE_TIMEOUT = 1000


class Node(RedisServer):
    """A node of a cluster. Its second port is 10,000 above the first one."""

    def __init__(self, *extra: str) -> None:
        options = ("--cluster-enabled", "yes", "--cluster-node-timeout", str(NODE_TIMEOUT))
        # A replica takes over even when it has not heard of its master for long: it may have been killed at once.
        super().__init__(*options, "--cluster-replica-validity-factor", "0", "--repl-diskless-sync-delay", "0", *extra)

    @property
    def address(self) -> str:
        """Where it is, as in URLs."""
        return f"127.0.0.1:{self.port}"

    def ask(self, *command: Any) -> Any:
        """Send one command, on a connection of its own."""
        with redis.Redis(port=self.port, decode_responses=True, socket_timeout=5.0) as client:
            return client.execute_command(*command)


@contextmanager
def node(*options: str) -> Iterator[Node]:
    """Run a node, on two ports that are free."""
    while True:
        server = Node(*options)
        try:
            server.start()
            break
        except ServerFailed as error:
            server.close()
            if "in use" not in str(error):
                raise
    try:
        yield server
    finally:
        server.close()


class RedisCluster:
    """Nodes that form a cluster. ``masters`` are those of the beginning; a slot may be moved since."""

    def __init__(self, *options: str, masters: int = MASTERS, replicas: int = MASTERS) -> None:
        self._options = options
        self._numbers = masters, replicas
        self.nodes: list[Node] = []

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self.nodes = [stack.enter_context(node(*self._options)) for _ in range(sum(self._numbers))]
            self._join()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def _join(self) -> None:
        masters = self.nodes[: self._numbers[0]]
        each = -(-REDIS_CLUSTER_HASH_SLOTS // len(masters))
        for number, master in enumerate(masters):
            master.ask("CLUSTER", "ADDSLOTS", *range(REDIS_CLUSTER_HASH_SLOTS)[number * each :][:each])
            # Else two of them may have the same epoch, and take seconds to agree on a failover.
            master.ask("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for other in self.nodes[1:]:
            self.nodes[0].ask("CLUSTER", "MEET", "127.0.0.1", other.port)
        eventually(lambda: all(self._knows_all(each) for each in self.nodes), "all nodes know each other")
        for number, replica in enumerate(self.nodes[len(masters) :]):
            replica.ask("CLUSTER", "REPLICATE", masters[number % len(masters)].ask("CLUSTER", "MYID"))
        eventually(lambda: all(map(is_ready, self.nodes)), "the cluster is up")

    def _knows_all(self, node: Node) -> bool:
        return f"cluster_known_nodes:{len(self.nodes)}" in node.ask("CLUSTER", "INFO")

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

    def _answering(self) -> Sequence[Node]:
        return [node for node in self.nodes if node.running and not node.frozen and is_ready(node)]


def is_ready(node: Node) -> bool:
    """Return whether a node serves, and has a copy of its master if it is a replica."""
    try:
        replication = node.ask("INFO", "replication")
        state = node.ask("CLUSTER", "INFO")
    except redis.RedisError:
        return False
    return "cluster_state:ok" in state and replication.get("master_link_status", "up") == "up"
