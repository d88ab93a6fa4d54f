"""Leads connections to the node of a Redis Cluster that owns the hash slot of our keys.

All keys of a database alias have one hash tag, and so one slot (``keys.py``): one node has all of them.
A node that fails, or that refuses a command because the slot is elsewhere, is forgotten, and the call fails. The next
connection asks the nodes which of them owns the slot. Until it is found, messages are delivered by query.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import redis
from redis.crc import key_slot

from .base import HashSlot
from .nodes import Address, address_of, as_text
from .timed import ANSWERS, TimedConnection, socket_of

# How a node says that it does not serve the slot, or not now. A script that had begun has the word within its error.
REFUSALS: dict[str, type[redis.RedisError]] = {
    "MOVED": redis.exceptions.MovedError,
    "ASK": redis.exceptions.AskError,
    "TRYAGAIN": redis.exceptions.TryAgainError,
    "CLUSTERDOWN": redis.exceptions.ClusterDownError,
    "READONLY": redis.exceptions.ReadOnlyError,
}
_WORD = re.compile(rf"\b({'|'.join(REFUSALS)})\b|UNBLOCKED|Script attempted to")
# Answers to a login or to a question that no other node answers otherwise.
NO_ACCESS = (redis.AuthenticationError, redis.exceptions.NoPermissionError)
# Words that only a node of a cluster says.
_OF_CLUSTER = ("MOVED", "ASK", "TRYAGAIN", "CLUSTERDOWN")


class SlotLost(redis.ConnectionError):
    """A node does not serve the slot of our keys at the moment."""


class SlotMoved(SlotLost):
    """Another node owns the slot of our keys, and is known."""


class Cluster:
    """What one broker knows of the cluster. Any thread may call it: each attribute is replaced as a whole."""

    def __init__(self, tag: str, addresses: Mapping[str, str] | None = None) -> None:
        """``addresses`` maps the addresses (host:port) that nodes tell to those at which they are reached."""
        self.slot = key_slot(tag.encode())
        # True: Redis is a cluster. A Redis behind a plain URL or a cache may be a cluster, too: then its answers say
        # so.
        self.is_seen = False
        # The addresses in the settings.
        self.seeds: tuple[Address, ...] = ()
        # The node that owns the slot; None: the nodes have to be asked.
        self.owner: Address | None = None
        self.replicas: tuple[Address, ...] = ()
        self._addresses = {address_of(told): address_of(reached) for told, reached in (addresses or {}).items()}
        self._nodes: tuple[Address, ...] = ()
        # Nodes that failed. They are asked after the others.
        self._suspects: frozenset[Address] = frozenset()

    @property
    def hash_slot(self) -> HashSlot | None:
        """The slot and its nodes, as far as they are known; None when Redis is no cluster."""
        if not self.is_seen:
            return None
        owner = self.owner and as_text(self.owner)
        return HashSlot(self.slot, owner or "", tuple(map(as_text, self.replicas)), len(self.seeds))

    def nodes(self) -> list[Address]:
        """Return the nodes to ask, in this order."""
        known = dict.fromkeys([*self._nodes, *self.seeds])
        return sorted(known, key=self._suspects.__contains__)

    def note(self, asked: Address, ranges: Sequence[Any]) -> Address:
        """Note what a node answers to CLUSTER SLOTS, and return the owner.

        Raises ``SlotLost`` when the node knows no owner, and anything when that is another answer.
        """
        found = [[self._address(node, asked) for node in nodes] for _start, _end, *nodes in ranges]
        ours = [nodes for (start, end, *_), nodes in zip(ranges, found, strict=True) if start <= self.slot <= end]
        if not ours:
            raise SlotLost(f"it knows no owner of hash slot {self.slot}")
        self._suspects -= {asked}
        self._nodes = tuple(address for nodes in found for address in nodes)
        self.owner, *replicas = ours[0]
        self.replicas = tuple(replicas)
        return ours[0][0]

    def _address(self, node: Sequence[Any], asked: Address) -> Address:
        """Return the address of a node. If the one that was asked names no host for it, it is on the same host."""
        host = (node[0] or b"").decode()
        told = (asked[0] if host in ("", "?") else host, int(node[1]))
        return self._addresses.get(told, told)

    def forget(self, address: Address) -> None:
        """Have the nodes asked again if this one was the owner; it is asked last."""
        self._suspects |= {address}
        if self.owner == address:
            self.owner = None

    def refused(self, address: Address, error: redis.RedisError) -> SlotLost | None:
        """Note an error in reading an answer of a node. Return the error to raise instead, if there is one."""
        word = self._refusal(error)
        self.is_seen = self.is_seen or word in _OF_CLUSTER
        if not self.is_seen or (word is None and isinstance(error, ANSWERS)):
            return None
        self.forget(address)
        if word is None:
            return None
        if word != "MOVED":
            return SlotLost(f"{as_text(address)} does not serve hash slot {self.slot} now: {error}")
        # The node that it names is asked first, and tells of the other nodes, too.
        host, port = address_of(str(error).rpartition(" ")[2])
        owner = self._address((host.encode(), port), address)
        self._suspects -= {owner}
        self._nodes = (owner, *self._nodes)
        return SlotMoved(f"hash slot {self.slot} was moved from {as_text(address)} to {as_text(owner)}")

    def _refusal(self, error: redis.RedisError) -> str | None:
        """Return the word by which a node says that it does not serve the slot; None for another error."""
        for word, kind in REFUSALS.items():
            if isinstance(error, kind):
                return word
        if not isinstance(error, redis.ResponseError):
            return None
        # Older releases of redis-py know some of these words in a client of a cluster only.
        found = (_WORD.search if self.is_seen else _WORD.match)(str(error))
        return found and (found[1] or "TRYAGAIN")


class SlotConnection(TimedConnection):
    """A connection to the node that owns the slot; without a cluster, to the server that the settings name."""

    # ``read_response`` of the class of redis-py: to call it by super() would cost each answer half a microsecond.
    _read: Callable[..., Any]

    def __init__(self, *, cluster: Cluster, **options: Any) -> None:
        super().__init__(**options)
        self._cluster = cluster

    @property
    def _node(self) -> Address:
        return self.host, self.port

    def leads_to_owner(self) -> bool:
        """Return whether this leads to the owner, as far as that is known. A connection to be made will lead there."""
        there = not self._cluster.is_seen or self._cluster.owner == self._node
        return there or self._attempt is not None or socket_of(self) is None

    def _is_connected(self) -> bool:
        if not self.leads_to_owner():
            self.disconnect()  # type: ignore[no-untyped-call]
        return super()._is_connected()

    def _is_one_step(self) -> bool:
        return not self._cluster.is_seen and super()._is_one_step()

    def _make(self) -> None:
        """Connect: without a cluster to the server of the settings, else to the owner, found first if it is unknown."""
        if not self._cluster.is_seen:
            super()._make()
            return
        owner = self._cluster.owner or self._find_owner()
        if socket_of(self) is not None and self._node == owner:
            return
        self.host, self.port = owner
        try:
            super()._make()
        except (redis.RedisError, OSError):
            self._cluster.forget(owner)
            raise

    def _find_owner(self) -> Address:
        """Ask one node after another who owns the slot. Leave the connection to the owner if that has answered."""
        problem: Exception = SlotLost("no address is known")
        for node in self._cluster.nodes():
            self.disconnect()  # type: ignore[no-untyped-call]
            self.host, self.port = node
            try:
                return self._ask(node)
            except Exception as error:  # noqa: BLE001
                self._cluster.forget(node)
                # A refusal says more than that another node does not answer.
                problem = problem if isinstance(problem, NO_ACCESS) else error
        self.disconnect()  # type: ignore[no-untyped-call]
        if isinstance(problem, NO_ACCESS):
            raise problem
        raise SlotLost(f"no node says who owns hash slot {self._cluster.slot}; {as_text(node)}: {problem}") from problem

    def _ask(self, node: Address) -> Address:
        """Connect to a node, and ask it who owns the slot. Keep the connection only if that node is the owner."""
        super()._make()
        questions = self.pack_commands([("CLUSTER", "INFO"), ("CLUSTER", "SLOTS")])  # type: ignore[no-untyped-call]
        self.send_packed_command(questions)  # type: ignore[no-untyped-call]
        state, ranges = self._read(), self._read()
        if b"cluster_state:ok" not in state:
            raise SlotLost("it is apart from the cluster, or the cluster is down")
        owner = self._cluster.note(node, ranges)
        if owner != node:
            self.disconnect()  # type: ignore[no-untyped-call]
        return owner

    def read_response(self, *args: Any, **options: Any) -> Any:
        """Read an answer. Raises ``SlotLost`` when the node does not serve the slot."""
        try:
            return self._read(*args, **options)
        except (redis.ResponseError, redis.ConnectionError, redis.TimeoutError) as error:
            lost = self._cluster.refused(self._node, error)
            if lost is None:
                raise
            self.disconnect()  # type: ignore[no-untyped-call]
            raise lost from error


class SlotPool(redis.ConnectionPool):
    """A pool that disowns connections to a node that no longer owns the slot: they are closed, and made anew."""

    def owns_connection(self, connection: Any) -> bool:
        """Return whether a connection is of this process and leads to the owner."""
        return bool(super().owns_connection(connection)) and connection.leads_to_owner()
