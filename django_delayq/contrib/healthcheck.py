"""A check for django-health-check 4: the findings of ``delayq_check``, on the page of the project's other checks."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from django.core.exceptions import ImproperlyConfigured
from django.db import connections, router

from ..broker import index
from ..core.findings import Level
from ..inspector import diagnostics
from ..inspector.diagnostics import Thresholds
from ..models import Message

try:
    from health_check.base import HealthCheck
    from health_check.exceptions import ServiceUnavailable
except ImportError as error:
    raise ImproperlyConfigured(
        f"{__name__} needs django-health-check 4: pip install 'django-delayq[health]'"
    ) from error

logger = logging.getLogger("django_delayq")


@dataclass
class DelayqHealthCheck(HealthCheck):  # type: ignore[misc]
    """Fails when a finding of ``delayq_check`` is critical. Warnings, such as a paused queue, are no failures.

    The limits are those of the command, ages in seconds. ``using`` is the database alias of the messages (None: that of
    the router). The page names the findings; the log has their texts.
    """

    using: str | None = None
    min_workers: int = 1
    max_overdue_age: float = 60.0
    max_dead: int | None = None
    max_limited_age: float | None = None

    def run(self) -> None:
        using = self.using or router.db_for_write(Message)
        was_open = connections[using].connection is not None
        broker = index(using)
        try:
            limits = Thresholds(self.min_workers, self.max_overdue_age, self.max_dead, self.max_limited_age)
            bad = [f for f in diagnostics.check(using, broker, limits) if f.level == Level.CRITICAL]
        finally:
            if broker is not None:
                broker.close()
            if not was_open:
                # This thread belongs to a pool: nobody else closes its connections.
                connections[using].close()
        if bad:
            logger.warning("The health check found: %s", "; ".join(f"{f.name}: {f.text}" for f in bad))
            raise ServiceUnavailable(f"critical: {', '.join(f.name for f in bad)}")
