"""``manage.py delayq_check``: check the database, Redis and the workers, for monitors."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError, CommandParser

from ...broker import index
from ...inspector import diagnostics
from ...inspector.diagnostics import Level, Limits
from .. import _common as common


class Command(common.DelayqCommand):
    help = (
        "Check the database, the migrations, Redis, the workers and the overdue messages, and write one line for each. "
        "A warning leaves the exit code 0."
    )
    exits = (0, 1, 2, 3, 69, 78)

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--min-workers", type=common.count, default=1, help="critical with fewer live workers (default 1)"
        )
        parser.add_argument(
            "--max-overdue-age",
            type=common.duration,
            default=60.0,
            help="critical when a message has been due for longer (default 60s)",
        )
        parser.add_argument(
            "--max-dead", type=common.count, help="critical with more dead messages (default: no limit)"
        )
        parser.add_argument(
            "--max-limited-age",
            type=common.duration,
            help="critical when a message has waited longer for a limit (default: never; a warning after 1h)",
        )
        common.add_json(parser)

    def work(self, using: str, options: dict[str, Any]) -> None:
        limits = Limits(
            options["min_workers"], options["max_overdue_age"], options["max_dead"], options["max_limited_age"]
        )
        broker = index(using)
        try:
            findings = list(diagnostics.check(using, broker, limits))
        finally:
            if broker is not None:
                broker.close()
        level = max(finding.level for finding in findings)
        if options["json"]:
            self.say_json(
                database=using,
                level=level.name.lower(),
                checks=[{"name": f.name, "level": f.level.name.lower(), "detail": f.detail} for f in findings],
            )
        else:
            for finding in findings:
                self.say(f"{self._word(finding.level)} {finding.name}: {finding.detail}")
        if (cause := diagnostics.worst(findings)) is not None:
            bad = sum(finding.level == Level.CRITICAL for finding in findings)
            raise CommandError(f"{bad} of {len(findings)} checks found a critical problem.", returncode=int(cause))

    def _word(self, level: Level) -> str:
        style = {Level.OK: self.style.SUCCESS, Level.WARN: self.style.WARNING, Level.CRITICAL: self.style.ERROR}
        return style[level](f"{level.name:<8}")
