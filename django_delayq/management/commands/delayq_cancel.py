"""``manage.py delayq_cancel``: cancel messages."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.db.models import QuerySet

from django_delayq import client
from django_delayq.management import _common as common
from django_delayq.models import Message
from django_delayq.states import LIVE, State
from django_delayq.transitions import BATCH, DONE, Verdict

SELECTORS = ("topic", "key", "queue", "state", "due_after", "due_before")


class Command(common.DelayqCommand):
    help = (
        "Cancel messages by id, or all live ones that selectors name. Says of how many it came to which answer: "
        "cancelled (none will start), requested (running: the handler can see it, no retry follows), outcome unknown "
        "(a delivery that died may have had its effect), too late, not found."
    )
    exits = (0, 1, 2, 4, 69, 78, 130)

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("ids", nargs="*", type=_id, metavar="ID", help="ids of messages; - reads them from stdin")
        common.add_selectors(parser)
        parser.add_argument("--key", help="only the message with this key")
        parser.add_argument(
            "--state",
            action="append",
            choices=sorted(state.value for state in LIVE),
            default=[],
            help="only in this state (default: both)",
        )
        parser.add_argument("--reason", default="", help="written to the log of each message")
        parser.add_argument("--dry-run", action="store_true", help="say what would be done, and write nothing")
        common.add_yes(parser)
        common.add_json(parser)

    def work(self, using: str, options: dict[str, Any]) -> None:
        ids = _ids(options["ids"])
        selected = any(options[name] for name in SELECTORS)
        if not ids and not selected and "-" not in options["ids"]:
            raise CommandError("Name ids or selectors: --topic, --key, --queue, …", returncode=common.USAGE)
        if (ids or "-" in options["ids"]) and selected:
            raise CommandError("Give ids or selectors, not both.", returncode=common.USAGE)
        rows = _selected(using, options)
        foreseen = self._foresee(using, ids, rows if selected else None)
        counts, interrupted = foreseen, None
        if not options["dry_run"]:
            number = sum(foreseen.values())
            if number > 1 or selected:
                self.confirm(f"{number:,} messages are to be cancelled.", yes=options["yes"])
            counts, interrupted = self._cancel(using, ids, rows if selected else None, options)
            self._record(using, ids, counts, options)
        self._say(using, counts, options)
        if interrupted is not None:
            raise CommandError("Interrupted between two batches.", returncode=interrupted)
        left = sum(number for verdict, number in counts.items() if verdict not in DONE)
        if left:
            raise CommandError(f"{left:,} were left as they are.", returncode=common.PARTIAL)

    def _foresee(self, using: str, ids: list[int], rows: QuerySet[Message] | None) -> Counter[Verdict]:
        """What it would come to now, as far as one can know."""
        counts: Counter[Verdict] = Counter()
        for chunk in [rows] if rows is not None else _chunks(using, ids):
            for state, deliveries, reported, number in _grouped(chunk):
                counts[_verdict(State(state), deliveries > reported)] += number
        missing = len(ids) - sum(counts.values())
        if rows is None and missing:
            counts[Verdict.NOT_FOUND] = missing
        return counts

    def _cancel(
        self, using: str, ids: list[int], rows: QuerySet[Message] | None, options: dict[str, Any]
    ) -> tuple[Counter[Verdict], int | None]:
        counts: Counter[Verdict] = Counter()
        seen = 0
        with common.Interruptible() as interruption:
            for chunk in _chunks(using, ids) if rows is None else _pages(rows):
                counts += client.cancel_message(chunk, reason=options["reason"], using=using)
                seen += BATCH
                if interruption.asked():
                    break
        if rows is None:
            missing = min(seen, len(ids)) - sum(counts.values())
            counts += Counter({Verdict.NOT_FOUND: missing})
        return counts, interruption.returncode if interruption.asked() else None

    def _record(self, using: str, ids: list[int], counts: Counter[Verdict], options: dict[str, Any]) -> None:
        self.record_action(
            using,
            "cancel",
            _target(ids, options),
            message_id=ids[0] if len(ids) == 1 else None,
            reason=options["reason"],
            outcomes={verdict.value: number for verdict, number in counts.items() if number},
        )

    def _say(self, using: str, counts: Counter[Verdict], options: dict[str, Any]) -> None:
        if options["json"]:
            answers = {str(verdict): number for verdict, number in counts.items() if number}
            self.say_json(database=using, dry_run=options["dry_run"], answers=answers)
            return
        would = "would be " if options["dry_run"] else ""
        for verdict, number in counts.items():
            self.say(f"{number:,} {would}{verdict}")
        if not counts:
            self.say("No such message.")


def _target(ids: list[int], options: dict[str, Any]) -> str:
    """The messages in words, for the audit."""
    if len(ids) == 1:
        return f"message #{ids[0]}"
    if ids:
        return f"{len(ids)} messages: {', '.join(f'#{pk}' for pk in ids[:50])}{', …' if len(ids) > 50 else ''}"
    return ", ".join(f"{name.replace('_', ' ')} {_shown(options[name])}" for name in SELECTORS if options[name])


def _shown(value: Any) -> str:
    return " or ".join(map(str, value)) if isinstance(value, list) else str(value)


def _id(text: str) -> int | str:
    return text if text == "-" else common.message_id(text)


def _ids(given: list[int | str]) -> list[int]:
    ids = {number for number in given if isinstance(number, int)}
    if "-" in given:
        try:
            ids |= {common.message_id(word) for line in sys.stdin for word in line.split()}
        except argparse.ArgumentTypeError as error:
            raise CommandError(f"stdin: {error}", returncode=common.USAGE) from error
    return sorted(ids)


def _selected(using: str, options: dict[str, Any]) -> QuerySet[Message]:
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


def _chunks(using: str, ids: list[int]) -> Iterator[QuerySet[Message]]:
    for start in range(0, len(ids), BATCH):
        yield Message.objects.using(using).filter(pk__in=ids[start : start + BATCH])


def _pages(rows: QuerySet[Message]) -> Iterator[QuerySet[Message]]:
    """The selected ones by key, each page as ids: rows that leave the selection on the way disturb nothing."""
    last = 0
    while True:
        ids = list(rows.filter(pk__gt=last).order_by("pk").values_list("pk", flat=True)[:BATCH])
        if not ids:
            return
        last = ids[-1]
        # The state again: what has finished since does not count as selected.
        yield rows.filter(pk__in=ids)


def _grouped(rows: QuerySet[Message]) -> Iterator[tuple[str, int, int, int]]:
    from django.db.models import Count

    yield from rows.order_by().values_list("state", "deliveries", "reported").annotate(Count("pk"))


def _verdict(state: State, silent: bool) -> Verdict:
    if state == State.RUNNING:
        return Verdict.REQUESTED
    if state != State.SCHEDULED:
        return Verdict.TOO_LATE
    return Verdict.OUTCOME_UNKNOWN if silent else Verdict.CANCELLED
