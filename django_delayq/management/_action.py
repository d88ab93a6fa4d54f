"""The base of the commands that do an action to messages, which are given by id or by selectors."""

from __future__ import annotations

import argparse
import sys
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from django.core.management.base import CommandError, CommandParser
from django.db.models import QuerySet

from ..actions import NO_TIMES, Action, Times, selected
from ..models import Message
from ..transitions import MOVES_PER_TRANSACTION
from ..verdicts import DONE, Verdict
from . import _common as common


class ActionCommand(common.DelayqCommand):
    """A command that does one action to messages. It counts them, asks, and then acts on exactly those messages.

    Messages that the selectors would find later are not touched, and the answer tells of those that changed meanwhile.
    """

    exits = (0, 1, 2, 4, 69, 78, 130)

    action: ClassVar[Action]
    # The word for what the action does, as in "This will <verb> 3 messages".
    verb: ClassVar[str]
    # The selectors: the name of an option, and the lookup that it stands for.
    selectors: ClassVar[dict[str, str]] = {
        "topic": "topic__in",
        "key": "key",
        "queue": "queue__in",
        "state": "state__in",
        "due_after": "due_at__gte",
        "due_before": "due_at__lt",
    }
    # The lines for people. With --json the verdicts themselves are the keys.
    lines: ClassVar[dict[Verdict, str]]
    dry_run_lines: ClassVar[dict[Verdict, str]]
    # What the error adds when neither ids nor selectors are given.
    usage_hint: ClassVar[str] = ""
    # The reasons why a message cannot be changed, for the last line.
    refusals: ClassVar[str]

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("ids", nargs="*", type=_id, metavar="ID", help="ids of messages; - reads ids from stdin")
        common.add_selectors(parser)
        parser.add_argument("--key", help="only the message with this key")
        parser.add_argument(
            "--state",
            action="append",
            choices=sorted(state.value for state in self.action.states),
            default=[],
            help="only messages in this state (repeatable; default: every one of them)",
        )
        parser.add_argument("--reason", default="", help="written to the log of each message")
        parser.add_argument("--dry-run", action="store_true", help="show what would be done, and write nothing")
        common.add_yes(parser)
        common.add_json(parser)

    def times(self, options: dict[str, Any]) -> Times:
        """Return the due times that the messages get."""
        return NO_TIMES

    @abstractmethod
    def foresee(self, rows: QuerySet[Message]) -> Counter[Verdict]:
        """Count the verdicts that the action would have now. It is called for one batch of messages at a time."""

    def details(self, options: dict[str, Any]) -> str:
        """Return what the question adds after the number of messages."""
        return ""

    def facts(self) -> dict[str, Any]:
        """Return what the JSON object has besides the verdicts."""
        return {}

    def work(self, using: str, options: dict[str, Any]) -> None:
        by_id, by_selectors = bool(options["ids"]), any(options[name] for name in self.selectors)
        if not by_id and not by_selectors:
            raise CommandError(
                f"Give ids of messages, or selectors such as --topic and --queue.{self.usage_hint}",
                returncode=common.USAGE,
            )
        if by_id and by_selectors:
            raise CommandError("Give ids or selectors, not both.", returncode=common.USAGE)
        ids = selected(self._selection(using, options)) if by_selectors else _ids(options["ids"])
        verdicts = self._foresee_all(using, ids)
        interrupted = None
        if not options["dry_run"]:
            number = _done(verdicts)
            if number > 1 or (number and by_selectors):
                what = f"This will {self.verb} {common.messages(number)}{self.details(options)}."
                self.confirm(what, yes=options["yes"])
            verdicts, interrupted = self._act(using, ids, options)
            self._record(using, [] if by_selectors else ids, verdicts, options)
        self._say(using, verdicts, options)
        if interrupted is not None:
            raise CommandError(
                "Interrupted between two batches: the other messages were not changed.", returncode=interrupted
            )
        total = sum(verdicts.values())
        if left := total - _done(verdicts):
            raise CommandError(
                f"{left:,} of {common.messages(total)} cannot be changed: {self.refusals}.", returncode=common.PARTIAL
            )

    def _selection(self, using: str, options: dict[str, Any]) -> QuerySet[Message]:
        """Return the messages that match the selectors."""
        rows = Message.objects.using(using).filter(state__in=sorted(self.action.states))
        for name, lookup in self.selectors.items():
            if options[name]:
                rows = rows.filter(**{lookup: options[name]})
        return rows

    def _foresee_all(self, using: str, ids: Sequence[int]) -> Counter[Verdict]:
        """Count the verdicts that the action would have now, without writing anything."""
        verdicts = sum(map(self.foresee, _rows(using, ids)), Counter[Verdict]())
        return verdicts + Counter({Verdict.NOT_FOUND: len(ids) - sum(verdicts.values())})

    def _act(self, using: str, ids: Sequence[int], options: dict[str, Any]) -> tuple[Counter[Verdict], int | None]:
        """Act batch by batch. Return the verdicts, and the exit code if a signal has interrupted it."""
        verdicts: Counter[Verdict] = Counter()
        with common.Interruptible() as interruption:
            for answers in self.action.apply_in_batches(
                using, ids, times=self.times(options), reason=options["reason"]
            ):
                verdicts.update(answer.verdict for answer in answers)
                if interruption.asked():
                    return verdicts, interruption.returncode
        return verdicts, None

    def _record(self, using: str, ids: Sequence[int], verdicts: Counter[Verdict], options: dict[str, Any]) -> None:
        self.record_action(
            using,
            self.action.name,
            self._target(ids, options),
            message_id=ids[0] if len(ids) == 1 else None,
            reason=options["reason"],
            outcomes={verdict.value: number for verdict, number in verdicts.items() if number},
        )

    def _target(self, ids: Sequence[int], options: dict[str, Any]) -> str:
        """Describe the messages in words, for the audit."""
        if len(ids) == 1:
            return f"message #{ids[0]}"
        if ids:
            return f"{len(ids)} messages: {', '.join(f'#{pk}' for pk in ids[:50])}{', …' if len(ids) > 50 else ''}"
        given = ((name.replace("_", " "), options[name]) for name in self.selectors if options[name])
        return ", ".join(f"{name} {_in_words(value)}" for name, value in given)

    def _say(self, using: str, verdicts: Counter[Verdict], options: dict[str, Any]) -> None:
        if options["json"]:
            answers = {str(verdict): number for verdict, number in verdicts.items() if number}
            self.say_json(database=using, dry_run=options["dry_run"], answers=answers, **self.facts())
            return
        lines = self.dry_run_lines if options["dry_run"] else self.lines
        for verdict, number in verdicts.items():
            self.say(lines[verdict].format(f"{number:,}"))
        if options["dry_run"] and (details := self.details(options)):
            self.say(details.removeprefix(": "))
        if not verdicts:
            self.say("No message matches.")


def _done(verdicts: Counter[Verdict]) -> int:
    """Return the number of messages that the action changes."""
    return sum(number for verdict, number in verdicts.items() if verdict in DONE)


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


def _rows(using: str, ids: Sequence[int]) -> Iterator[QuerySet[Message]]:
    for start in range(0, len(ids), MOVES_PER_TRANSACTION):
        yield Message.objects.using(using).filter(pk__in=list(ids[start : start + MOVES_PER_TRANSACTION]))
