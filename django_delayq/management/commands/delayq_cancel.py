"""``manage.py delayq_cancel``: cancel messages."""

from __future__ import annotations

from collections import Counter

from django.db.models import QuerySet

from ... import actions
from ...models import Message
from ...verdicts import Verdict
from .._action import ActionCommand


class Command(ActionCommand):
    help = (
        "Cancel messages by id, or all live messages that match the selectors. The answer counts the messages by "
        "verdict: cancelled (no delivery will start), requested (running: the handler can see the request, and no "
        "retry follows), outcome unknown (cancelled, but a delivery that crashed may have had its effect), too late "
        "(finished already), not found."
    )
    action = actions.CANCEL
    verb = "cancel"
    lines = {
        Verdict.CANCELLED: "{} cancelled",
        Verdict.REQUESTED: "{} running, asked to stop",
        Verdict.OUTCOME_UNKNOWN: "{} cancelled, but an earlier delivery crashed and may have had its effect",
        Verdict.TOO_LATE: "{} not cancelled: finished already",
        Verdict.NOT_FOUND: "{} not found",
    }
    dry_run_lines = {
        **lines,
        Verdict.CANCELLED: "{} would be cancelled",
        Verdict.REQUESTED: "{} running, would be asked to stop",
        Verdict.OUTCOME_UNKNOWN: "{} would be cancelled, but an earlier delivery crashed and may have had its effect",
    }
    refusals = "finished already, or not found"

    def foresee(self, rows: QuerySet[Message]) -> Counter[Verdict]:
        return actions.foresee_cancel(rows)
