"""``manage.py delayq_run``: make scheduled messages due now."""

from __future__ import annotations

from collections import Counter
from typing import Any

from django.core.management.base import CommandParser
from django.db.models import QuerySet

from ... import actions
from ...durations import brief
from ...models import Message
from ...verdicts import Verdict
from .. import _common as common
from .._action import ActionCommand


class Command(ActionCommand):
    help = (
        "Make messages that wait due now, by id, or all that match the selectors: workers run them at once, except in "
        "paused queues and over a limit. (The worker itself is the command run_delayq.) The time of expiry moves by as "
        "much. The answer counts the messages by verdict: rescheduled, too late (running, or finished), not found."
    )
    action = actions.RUN_NOW
    verb = "run"
    usage_hint = " To start a worker: run_delayq."
    lines = {
        Verdict.RESCHEDULED: "{} due now",
        Verdict.TOO_LATE: "{} not changed: running, or finished already",
        Verdict.NOT_FOUND: "{} not found",
    }
    dry_run_lines = {**lines, Verdict.RESCHEDULED: "{} would be due now"}
    refusals = "running, finished already, or not found"

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        common.add_spread(parser)

    def times(self, options: dict[str, Any]) -> actions.Times:
        return actions.Times(spread=options["spread"])

    def foresee(self, rows: QuerySet[Message]) -> Counter[Verdict]:
        return actions.foresee_reschedule(rows)

    def details(self, options: dict[str, Any]) -> str:
        """Return in words when the messages will run."""
        spread = options["spread"]
        return f": due over {brief(spread.total_seconds())} from now on" if spread else ": due now"
