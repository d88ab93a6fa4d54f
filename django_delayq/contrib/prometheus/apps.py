"""The app: add it to ``INSTALLED_APPS``, and ``run_delayq`` has the option ``--metrics-port``."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from typing import TYPE_CHECKING

from django.apps import AppConfig
from django.core.exceptions import ImproperlyConfigured

from ... import extensions

if TYPE_CHECKING:
    from ...core.worker_options import Options


class PrometheusConfig(AppConfig):
    """Adds the option to workers. prometheus_client is imported when the option is used, and not before."""

    name = "django_delayq.contrib.prometheus"
    label = "delayq_prometheus"

    def ready(self) -> None:
        if find_spec("prometheus_client") is None:
            raise ImproperlyConfigured(
                f"{self.name} needs prometheus_client: pip install 'django-delayq[prometheus]', "
                "or take the app out of INSTALLED_APPS."
            )
        extensions.add_worker_option(
            "--metrics-port",
            _begin,
            type=address,
            metavar="[HOST:]PORT",
            help="serve metrics for Prometheus at /metrics on this port (default: do not)",
        )
        extensions.add_exposition(_expose)


def address(text: str) -> tuple[str, int]:
    """Read ``PORT``, ``HOST:PORT`` or ``[IPV6]:PORT``; the host "" stands for all addresses of this machine."""
    host, _colon, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit() and int(port) <= 65535):
        raise argparse.ArgumentTypeError(f"not a port: {text!r}; write 9808 or 127.0.0.1:9808")
    # Raises a ValueError, as argparse wants it, for what cannot be a name.
    host.encode("idna")
    return host.strip("[]"), int(port)


def _expose(using: str, prefix: str) -> bytes:
    from .exposition import expose

    return expose(using, prefix)


def _begin(options: Options, address: tuple[str, int]) -> None:
    from .server import serve

    serve(options, *address)
