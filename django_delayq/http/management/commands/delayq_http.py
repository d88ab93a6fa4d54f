"""``manage.py delayq_http``: the HTTP door as a server by itself."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError, CommandParser

from ....core import values
from ....management import _common as common
from ....project import http_conf


class Command(common.DelayqCommand):
    help = (
        "Serve the HTTP door, and nothing else of the project, until SIGTERM or SIGINT. Then requests that wait are "
        "answered, and it ends. No middleware of the project runs. It needs the extra django-delayq[http]."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--host",
            type=host,
            default="127.0.0.1",
            metavar="HOST",
            help="the address to listen at (by default 127.0.0.1)",
        )
        parser.add_argument(
            "--port", type=_port, default=7777, metavar="PORT", help="the port (by default 7777; 0 takes a free one)"
        )

    def work(self, using: str, options: dict[str, Any]) -> None:
        common.require_routed(using)
        # Uvicorn may be missing.
        from ... import standalone

        http_conf.get()
        try:
            listener = standalone.listen(options["host"], options["port"])
        except OSError as error:
            raise CommandError(f"Cannot listen at {options['host']}, port {options['port']}: {error}") from error
        with listener, common.Interruptible() as interrupted:
            address, port = listener.getsockname()[:2]
            self.say(f"Serves http://{f'[{address}]' if ':' in address else address}:{port}")
            self.stdout.flush()
            standalone.serve(listener, interrupted)


def host(text: str) -> str:
    """Read an address or the name of a host."""
    # Raises a ValueError, as argparse wants it, for what cannot be a name.
    text.encode("idna")
    return text


def _port(text: str) -> int:
    """Read the number of a port."""
    return common.checked(values.whole, common.count(text), 0, 65_535)
