"""``manage.py delayq_requeue``: schedule finished messages again."""

from __future__ import annotations

from collections import Counter
from typing import Any

from django.core.management.base import CommandParser
from django.db.models import QuerySet

from ... import actions
from ...actions import ToCome
from ...clock import iso
from ...durations import brief
from ...models import Message
from ...transitions import NO_TIME
from ...verdicts import Verdict
from .. import _common as common
from .._action import ActionCommand


class Command(ActionCommand):
    help = (
        "Schedule dead, expired and cancelled messages again, by id, or all that match the selectors; their attempts "
        "start anew. A message whose due time is still to come keeps it, and any other is due at once. The answer "
        "counts the messages by verdict: requeued, too late (live, or consumed), key taken (another message holds "
        "the topic and key), not found."
    )
    action = actions.REQUEUE
    verb = "requeue"
    selectors = {
        **ActionCommand.selectors,
        "finished_after": "finished_at__gte",
        "finished_before": "finished_at__lt",
    }
    lines = {
        Verdict.REQUEUED: "{} requeued",
        Verdict.TOO_LATE: "{} not requeued: live, or consumed",
        Verdict.KEY_TAKEN: "{} not requeued: another message holds the topic and key",
        Verdict.NOT_FOUND: "{} not found",
    }
    dry_run_lines = {**lines, Verdict.REQUEUED: "{} would be requeued"}
    refusals = "live, consumed, their key is taken, or not found"

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--finished-after",
            type=common.moment,
            help="only messages that finished at this time or later (ISO 8601 with time zone)",
        )
        parser.add_argument(
            "--finished-before", type=common.moment, help="only messages that finished before this time"
        )
        common.add_spread(parser, "the messages that would be due at once")
        parser.add_argument(
            "--now", action="store_true", help="give up due times that are still to come: all messages are due now"
        )

    def work(self, using: str, options: dict[str, Any]) -> None:
        self._to_come, self._number = ToCome(), 0
        super().work(using, options)

    def times(self, options: dict[str, Any]) -> actions.Times:
        return actions.Times(delay=NO_TIME if options["now"] else None, spread=options["spread"])

    def foresee(self, rows: QuerySet[Message]) -> Counter[Verdict]:
        verdicts = actions.foresee_requeue(rows)
        self._number += verdicts[Verdict.REQUEUED]
        self._to_come += actions.to_come(rows.filter(state__in=sorted(self.action.states)))
        return verdicts

    def details(self, options: dict[str, Any]) -> str:
        """Return in words how many messages will be due when."""
        later = 0 if options["now"] else min(self._to_come.number, self._number)
        others = self._number - later
        parts = []
        if later:
            first, last = iso(self._to_come.first), iso(self._to_come.last)
            parts.append(f"{later:,} at their own due times, from {first} to {last}")
        if others:
            when = f"over {brief(options['spread'].total_seconds())} from now on" if options["spread"] else "at once"
            parts.append(f"{others:,} {when}")
        return f": {', '.join(parts)}" if parts else ""

    def facts(self) -> dict[str, Any]:
        return {"due_to_come": self._to_come.number}
