"""``manage.py delayq_reschedule``: give scheduled messages another due time."""

from __future__ import annotations

from collections import Counter
from typing import Any

from django.core.management.base import CommandParser
from django.db.models import QuerySet

from ... import actions
from ...clock import iso
from ...durations import brief
from ...models import Message
from ...transitions import NO_TIME
from ...verdicts import Verdict
from .. import _common as common
from .._action import ActionCommand


class Command(ActionCommand):
    help = (
        "Give messages that wait another due time, by id, or all that match the selectors: --due-at, --delay from now, "
        "or --shift from the due time that each has. The time of expiry moves by as much. The answer counts the "
        "messages by verdict: rescheduled, too late (running, or finished), not found."
    )
    action = actions.RESCHEDULE
    verb = "reschedule"
    lines = {
        Verdict.RESCHEDULED: "{} rescheduled",
        Verdict.TOO_LATE: "{} not rescheduled: running, or finished already",
        Verdict.NOT_FOUND: "{} not found",
    }
    dry_run_lines = {**lines, Verdict.RESCHEDULED: "{} would be rescheduled"}
    refusals = "running, finished already, or not found"

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        when = parser.add_mutually_exclusive_group(required=True)
        when.add_argument("--due-at", type=common.due, metavar="TIME", help="due at this time (ISO 8601 with zone)")
        when.add_argument("--delay", type=common.span, metavar="TIME", help="due after this time from now, e.g. 2h")
        when.add_argument(
            "--shift",
            type=common.signed_span,
            metavar="TIME",
            help="due by this much later than now planned, e.g. 2h; or earlier, but not before now: --shift=-30m",
        )
        common.add_spread(parser)

    def times(self, options: dict[str, Any]) -> actions.Times:
        return actions.Times(
            due_at=options["due_at"], delay=options["delay"], shift=options["shift"], spread=options["spread"]
        )

    def foresee(self, rows: QuerySet[Message]) -> Counter[Verdict]:
        return actions.foresee_reschedule(rows)

    def details(self, options: dict[str, Any]) -> str:
        """Return in words when the messages will be due."""
        shift = options["shift"]
        if options["due_at"] is not None:
            when = f"due at {iso(options['due_at'])}"
        elif shift is None:
            when = f"due in {brief(options['delay'].total_seconds())}"
        elif shift < NO_TIME:
            when = f"earlier by {brief(-shift.total_seconds())}, but not before now"
        else:
            when = f"later by {brief(shift.total_seconds())}"
        spread = options["spread"]
        return f": {when}{f', spread over {brief(spread.total_seconds())}' if spread else ''}"
