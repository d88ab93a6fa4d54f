"""``manage.py delayq_cancel``: cancel messages."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.db.models import QuerySet

from ... import actions
from ...models import Message
from ...states import LIVE
from ...transitions import MOVES_PER_TRANSACTION
from ...verdicts import DONE, Verdict
from .. import _common as common

SELECTORS = ("topic", "key", "queue", "state", "due_after", "due_before")

# The lines for people. With --json the verdicts themselves are the keys.
VERDICT_LINES = {
    Verdict.CANCELLED: "{} cancelled",
    Verdict.REQUESTED: "{} running, asked to stop",
    Verdict.OUTCOME_UNKNOWN: "{} cancelled, but an earlier delivery crashed and may have had its effect",
    Verdict.TOO_LATE: "{} not cancelled: finished already",
    Verdict.NOT_FOUND: "{} not found",
}
DRY_RUN_LINES = {
    **VERDICT_LINES,
    Verdict.CANCELLED: "{} would be cancelled",
    Verdict.REQUESTED: "{} running, would be asked to stop",
    Verdict.OUTCOME_UNKNOWN: "{} would be cancelled, but an earlier delivery crashed and may have had its effect",
}


class Command(common.DelayqCommand):
    help = (
        "Cancel messages by id, or all live messages that match the selectors. The answer counts the messages by "
        "verdict: cancelled (no delivery will start), requested (running: the handler can see the request, and no "
        "retry follows), outcome unknown (cancelled, but a delivery that crashed may have had its effect), too late "
        "(finished already), not found."
    )
    exits = (0, 1, 2, 4, 69, 78, 130)

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("ids", nargs="*", type=_id, metavar="ID", help="ids of messages; - reads ids from stdin")
        common.add_selectors(parser)
        parser.add_argument("--key", help="only the message with this key")
        parser.add_argument(
            "--state",
            action="append",
            choices=sorted(state.value for state in LIVE),
            default=[],
            help="only messages in this state (default: both)",
        )
        parser.add_argument("--reason", default="", help="written to the log of each message")
        parser.add_argument("--dry-run", action="store_true", help="show what would be cancelled, and write nothing")
        common.add_yes(parser)
        common.add_json(parser)

    def work(self, using: str, options: dict[str, Any]) -> None:
        ids = _ids(options["ids"])
        by_id, by_selectors = bool(options["ids"]), any(options[name] for name in SELECTORS)
        if not by_id and not by_selectors:
            raise CommandError(
                "Give ids of messages, or selectors such as --topic and --queue.", returncode=common.USAGE
            )
        if by_id and by_selectors:
            raise CommandError("Give ids or selectors, not both.", returncode=common.USAGE)
        rows = _selected(using, options) if by_selectors else None
        verdicts = _foresee(using, ids, rows)
        interrupted = None
        if not options["dry_run"]:
            number = sum(verdicts.values())
            if number > 1 or by_selectors:
                self.confirm(f"This will cancel {common.messages(number)}.", yes=options["yes"])
            verdicts, interrupted = self._cancel(using, ids, rows, options["reason"])
            self._record(using, ids, verdicts, options)
        self._say(using, verdicts, options)
        if interrupted is not None:
            raise CommandError(
                "Interrupted between two batches: the other messages were not cancelled.", returncode=interrupted
            )
        total, left = sum(verdicts.values()), sum(verdicts[verdict] for verdict in verdicts if verdict not in DONE)
        if left:
            raise CommandError(
                f"{left:,} of {common.messages(total)} cannot be cancelled: finished already, or not found.",
                returncode=common.PARTIAL,
            )

    def _cancel(
        self, using: str, ids: list[int], rows: QuerySet[Message] | None, reason: str
    ) -> tuple[Counter[Verdict], int | None]:
        """Cancel batch by batch. Return the verdicts, and the exit code if a signal has interrupted it."""
        verdicts: Counter[Verdict] = Counter()
        seen = 0
        with common.Interruptible() as interruption:
            for batch in _batches_of_ids(using, ids) if rows is None else _batches_of_rows(rows):
                verdicts += actions.cancel_message(batch, reason=reason, using=using)
                seen += MOVES_PER_TRANSACTION
                if interruption.asked():
                    break
        if rows is None:
            verdicts += _not_found(ids[:seen], verdicts)
        return verdicts, interruption.returncode if interruption.asked() else None

    def _record(self, using: str, ids: list[int], verdicts: Counter[Verdict], options: dict[str, Any]) -> None:
        self.record_action(
            using,
            "cancel",
            _target(ids, options),
            message_id=ids[0] if len(ids) == 1 else None,
            reason=options["reason"],
            outcomes={verdict.value: number for verdict, number in verdicts.items() if number},
        )

    def _say(self, using: str, verdicts: Counter[Verdict], options: dict[str, Any]) -> None:
        if options["json"]:
            answers = {str(verdict): number for verdict, number in verdicts.items() if number}
            self.say_json(database=using, dry_run=options["dry_run"], answers=answers)
            return
        lines = DRY_RUN_LINES if options["dry_run"] else VERDICT_LINES
        for verdict, number in verdicts.items():
            self.say(lines[verdict].format(f"{number:,}"))
        if not verdicts:
            self.say("No message matches.")


def _foresee(using: str, ids: list[int], rows: QuerySet[Message] | None) -> Counter[Verdict]:
    """Count the verdicts that a cancel would have now, without writing anything."""
    if rows is not None:
        return actions.foresee_cancel(rows)
    verdicts = sum(map(actions.foresee_cancel, _batches_of_ids(using, ids)), Counter[Verdict]())
    return verdicts + _not_found(ids, verdicts)


def _not_found(ids: list[int], verdicts: Counter[Verdict]) -> Counter[Verdict]:
    """Count the ids without a verdict: there is no such message."""
    return Counter({Verdict.NOT_FOUND: len(ids) - sum(verdicts.values())})


def _target(ids: list[int], options: dict[str, Any]) -> str:
    """Describe the messages in words, for the audit."""
    if len(ids) == 1:
        return f"message #{ids[0]}"
    if ids:
        return f"{len(ids)} messages: {', '.join(f'#{pk}' for pk in ids[:50])}{', …' if len(ids) > 50 else ''}"
    return ", ".join(f"{name.replace('_', ' ')} {_in_words(options[name])}" for name in SELECTORS if options[name])


def _in_words(value: Any) -> str:
    return " or ".join(map(str, value)) if isinstance(value, list) else str(value)


def _id(text: str) -> int | str:
    return text if text == "-" else common.message_id(text)


def _ids(given: list[int | str]) -> list[int]:
    """Return the ids of the command line, and those of stdin if a ``-`` is among them."""
    ids = {number for number in given if isinstance(number, int)}
    if "-" in given:
        try:
            ids |= {common.message_id(word) for line in sys.stdin for word in line.split()}
        except argparse.ArgumentTypeError as error:
            raise CommandError(f"stdin: {error}", returncode=common.USAGE) from error
    return sorted(ids)


def _selected(using: str, options: dict[str, Any]) -> QuerySet[Message]:
    """Return the live messages that match the selectors."""
    rows = Message.objects.using(using).filter(state__in=options["state"] or sorted(LIVE))
    for name, lookup in (
        ("topic", "topic__in"),
        ("queue", "queue__in"),
        ("key", "key"),
        ("due_after", "due_at__gte"),
        ("due_before", "due_at__lt"),
    ):
        if options[name]:
            rows = rows.filter(**{lookup: options[name]})
    return rows


def _batches_of_ids(using: str, ids: list[int]) -> Iterator[QuerySet[Message]]:
    for start in range(0, len(ids), MOVES_PER_TRANSACTION):
        yield Message.objects.using(using).filter(pk__in=ids[start : start + MOVES_PER_TRANSACTION])


def _batches_of_rows(rows: QuerySet[Message]) -> Iterator[QuerySet[Message]]:
    """Yield the selected messages in batches, in the order of their ids. Rows may leave the selection meanwhile."""
    last = 0
    while True:
        ids = list(rows.filter(pk__gt=last).order_by("pk").values_list("pk", flat=True)[:MOVES_PER_TRANSACTION])
        if not ids:
            return
        last = ids[-1]
        # The conditions are applied again: a message that has finished meanwhile is not selected any more.
        yield rows.filter(pk__in=ids)
