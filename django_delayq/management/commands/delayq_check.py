"""``manage.py delayq_check``: check the database, Redis and the workers, for monitors."""

from __future__ import annotations

import sys
from typing import Any

from django.core.management.base import CommandError, CommandParser

from ...broker import index
from ...inspector import diagnostics
from ...inspector.diagnostics import Finding, Level, Limits
from .. import _common as common

NAGIOS = {Level.OK: "OK", Level.WARN: "WARNING", Level.CRITICAL: "CRITICAL"}


class Command(common.DelayqCommand):
    help = (
        "Check the database, the migrations, Redis, the workers and the overdue messages, and write one line for each. "
        "A warning leaves the exit code 0. With --nagios the exit codes are 0 OK, 1 WARNING, 2 CRITICAL and 3 UNKNOWN."
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
        parser.add_argument(
            "--nagios", action="store_true", help="write a summary first, and use the exit codes of a Nagios plugin"
        )
        common.add_json(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            super().handle(*args, **options)
        except CommandError as error:
            # The checks could not be made: a monitor shows that as unknown.
            if options["nagios"] and error.returncode != common.USAGE:
                self.say(f"DELAYQ UNKNOWN - {error}")
                sys.exit(3)
            raise

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
            if options["nagios"]:
                self.say(_summary(findings, level))
            for finding in findings:
                self.say(f"{self._word(finding.level)} {finding.name}: {finding.detail}")
        if options["nagios"]:
            if level != Level.OK:
                sys.exit(int(level))
        elif (cause := diagnostics.worst(findings)) is not None:
            bad = sum(finding.level == Level.CRITICAL for finding in findings)
            raise CommandError(f"{bad} of {len(findings)} checks found a critical problem.", returncode=int(cause))

    def _word(self, level: Level) -> str:
        style = {Level.OK: self.style.SUCCESS, Level.WARN: self.style.WARNING, Level.CRITICAL: self.style.ERROR}
        return style[level](f"{level.name:<8}")


def _summary(findings: list[Finding], level: Level) -> str:
    bad = [f"{f.name}: {f.detail}" for f in findings if f.level == level and level != Level.OK]
    return f"DELAYQ {NAGIOS[level]} - {'; '.join(bad) or f'{len(findings)} checks'}"
