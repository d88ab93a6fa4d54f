"""The URL that names nodes of a Redis Cluster: ``redis+cluster://user:password@host:port,host:port``."""

from __future__ import annotations

from urllib.parse import urlsplit

# The host and the port of a node.
Address = tuple[str, int]

SCHEMES = ("redis+cluster", "rediss+cluster")
USUAL_PORT = 6379


def nodes_in(url: str) -> tuple[str, tuple[Address, ...]] | None:
    """Return the URL of the first node, as redis-py reads it, and all nodes; None for a URL of another kind.

    Raises ``ValueError`` when it cannot be read.
    """
    scheme, _, _ = url.partition("://")
    if scheme not in SCHEMES:
        return None
    parts = urlsplit(url)
    who, at, hosts = parts.netloc.rpartition("@")
    nodes = tuple(address_of(node) for node in hosts.split(","))
    first = parts._replace(scheme=scheme.removesuffix("+cluster"), netloc=who + at + hosts.split(",")[0])
    return first.geturl(), nodes


def address_of(text: str) -> Address:
    """Read an address, ``host:port``, ``[address of IPv6]:port`` or ``host``. Raises ``ValueError``."""
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, str(USUAL_PORT)
    host = host.removeprefix("[").removesuffix("]")
    if not host or not 0 < int(port) < 65_536:
        raise ValueError(f"{text!r} is no host:port")
    return host, int(port)


def as_text(address: Address) -> str:
    """Return an address as it stands in settings and in answers."""
    return f"{address[0]}:{address[1]}"
