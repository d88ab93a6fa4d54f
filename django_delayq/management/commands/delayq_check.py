"""``manage.py delayq_check``: check whether all is well, compare the record with Redis, list the handlers."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError, CommandParser

from ...broker import index
from ...core.findings import Level
from ...inspector import diagnostics
from ...inspector.diagnostics import Thresholds
from .. import _common as common
from .._consistency import compare
from .._handlers import list_handlers

# What can be checked, and the options that belong to one of them alone.
WHAT: dict[str, tuple[str, ...]] = {
    "health": ("min_workers", "max_overdue_age", "max_dead", "max_limited_age"),
    "redis": ("queue", "fix"),
    "handlers": (),
}


class Command(common.DelayqCommand):
    help = (
        "health (default): check the database, the migrations, Redis, the workers and the overdue messages, and write "
        "one line for each; a warning leaves the exit code 0. redis: compare the record with Redis, and find messages "
        "that are missing in Redis, ids that are extra there, due times that are different, and running messages whose "
        "lease ran out long ago. A mismatch counts if it is still there after DELAYQ['GRACE'], because a message may "
        "be on its way. Workers repair all of this by themselves in time; --fix repairs it at once, except for running "
        "messages. handlers: list the topics of this project with their functions and options, and warn of topics of "
        "waiting messages that have no handler here and in no live worker."
    )
    exits = (0, 1, 2, 3, 69, 78)

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "what", nargs="?", choices=tuple(WHAT), default="health", metavar="WHAT", help=", ".join(WHAT)
        )
        parser.add_argument(
            "--min-workers", type=common.count, help="health: critical with fewer live workers (default 1)"
        )
        parser.add_argument(
            "--max-overdue-age",
            type=common.duration,
            help="health: critical when a message has been due for longer (default 60s)",
        )
        parser.add_argument(
            "--max-dead", type=common.count, help="health: critical with more dead messages (default: no limit)"
        )
        parser.add_argument(
            "--max-limited-age",
            type=common.duration,
            help="health: critical when a message has waited longer for a limit (default: never; a warning after 1h)",
        )
        parser.add_argument(
            "--queue", action="append", type=common.queue_name, default=[], help="redis: only this queue (repeatable)"
        )
        parser.add_argument(
            "--fix", action="store_true", help="redis: put ids that are missing or different, and remove extra ids"
        )
        common.add_json(parser)

    def work(self, using: str, options: dict[str, Any]) -> None:
        for what, names in WHAT.items():
            for name in names if what != options["what"] else ():
                if options[name] not in (None, []) and options[name] is not False:
                    raise CommandError(f"--{name.replace('_', '-')} belongs to {what}.", returncode=common.USAGE)
        if options["what"] == "redis":
            compare(self, using, options)
        elif options["what"] == "handlers":
            list_handlers(self, using, options)
        else:
            self._check_health(using, options)

    def _check_health(self, using: str, options: dict[str, Any]) -> None:
        given = {name: options[name] for name in WHAT["health"] if options[name] is not None}
        broker = index(using)
        try:
            findings = diagnostics.check(using, broker, Thresholds(**given))
        finally:
            if broker is not None:
                broker.close()
        level = max(finding.level for finding in findings)
        if options["json"]:
            self.say_json(
                database=using,
                level=level.name.lower(),
                checks=[{"name": f.name, "level": f.level.name.lower(), "detail": f.text} for f in findings],
            )
        else:
            for finding in findings:
                self.say(f"{self._word(finding.level)} {finding.name}: {finding.text}")
        if (cause := diagnostics.worst(findings)) is not None:
            bad = sum(finding.level == Level.CRITICAL for finding in findings)
            raise CommandError(f"{bad} of {len(findings)} checks found a critical problem.", returncode=int(cause))

    def _word(self, level: Level) -> str:
        style = {Level.OK: self.style.SUCCESS, Level.WARN: self.style.WARNING, Level.CRITICAL: self.style.ERROR}
        return style[level](f"{level.name:<8}")
