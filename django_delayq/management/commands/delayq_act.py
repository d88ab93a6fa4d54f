"""``manage.py delayq_act``: cancel, reschedule, run, move, requeue and purge messages, and rehearse one."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Literal

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db.models import Q, QuerySet

from ... import signals
from ...api import actions
from ...api.actions import ACTIONS, Action, ToCome, selected
from ...core.chunks import chunks
from ...core.clock import NO_TIME, iso
from ...core.durations import brief
from ...core.states import LIVE, State
from ...core.text import visible
from ...core.verbs import VERBS, Verb
from ...core.verdicts import DONE, Verdict
from ...models import Message
from ...record import purge, reads
from ...record.transitions import ANY, MOVES_PER_TRANSACTION, Answer, DueTimes
from ...worker.run.rehearsal import NotRehearsable, rehearse
from .. import _common as common

# --- when messages will be due, in words ------------------------------------------------------------------------------


def _when_rescheduled(times: DueTimes, number: int, to_come: ToCome) -> str:
    """Return in words when messages will be due that are rescheduled."""
    if times.due_at is not None:
        when = f"due at {iso(times.due_at)}"
    elif times.delay is not None:
        when = f"due in {brief(times.delay.total_seconds())}"
    elif times.shift is not None and times.shift < NO_TIME:
        when = f"earlier by {brief(-times.shift.total_seconds())}, but not before now"
    else:
        when = f"later by {brief((times.shift or NO_TIME).total_seconds())}"
    return f"{when}, spread over {brief(times.spread.total_seconds())}" if times.spread else when


def _when_run(times: DueTimes, number: int, to_come: ToCome) -> str:
    return f"due over {brief(times.spread.total_seconds())} from now on" if times.spread else "due now"


def _where_moved(times: DueTimes, number: int, to_come: ToCome) -> str:
    to = "" if times.queue is None else f"to the queue {times.queue}"
    return " ".join(filter(None, (to, "" if times.priority is None else f"with priority {times.priority}")))


def _when_requeued(times: DueTimes, number: int, to_come: ToCome) -> str:
    """Return in words how many messages will be due when."""
    later = min(to_come.number, number) if times.name_none else 0
    parts, start = [], ""
    if times.due_at is not None:
        start = f"at {iso(times.due_at)}"
    elif times.delay:
        start = f"in {brief(times.delay.total_seconds())}"
    if later:
        first, last = iso(to_come.first), iso(to_come.last)
        parts.append(f"{later:,} at their own due times, from {first} to {last}")
    if others := number - later:
        since = "then" if start else "now"
        over = f"over {brief(times.spread.total_seconds())} from {since} on" if times.spread else ""
        parts.append(f"{others:,} {' '.join(filter(None, (start, over))) or 'at once'}")
    if times.expires is not None:
        life = (
            f"expires {brief(times.expires.total_seconds())} after its due time" if times.expires else "never expires"
        )
        parts.append(f"each {life}")
    return ", ".join(parts)


# By verb: the function that says when this number of messages will be due, some of which have due times to come; or
# where.
_WHEN: dict[str, Callable[[DueTimes, int, ToCome], str]] = {
    "reschedule": _when_rescheduled,
    "run": _when_run,
    "move": _where_moved,
    "requeue": _when_requeued,
}

# --- the command ------------------------------------------------------------------------------------------------------

REHEARSE = VERBS["rehearse"]

# The selectors: the name of each option, and the lookup that it stands for.
SELECTORS = {
    "topic": "topic__in",
    "key": "key",
    "queue": "queue__in",
    "state": "state__in",
    "due_after": "due_at__gte",
    "due_before": "due_at__lt",
    "finished_after": "finished_at__gte",
    "finished_before": "finished_at__lt",
}


class Command(common.DelayqCommand):
    """Counts the messages, asks, and then acts on exactly those.

    Messages that the selectors would find later are not touched, and the answer counts those that changed meanwhile.
    With ``--key`` a message that has handed its key over meanwhile is left alone: the action is for its next one.
    """

    help = (
        "Act on messages, by id, or on all that match the selectors. The command counts them by verdict, asks, and "
        "acts on exactly those messages. delayq_act VERB --help describes the options of a verb."
    )
    exits = (0, 1, 2, 4, 69, 78, 130)

    def add_arguments(self, parser: CommandParser) -> None:
        common.give_hints(parser, _MEANT)
        # Django's own options may stand before the verb, and after it.
        django = BaseCommand().create_parser("", "", argument_default=argparse.SUPPRESS)
        all_verbs = [*(action.verb for action in ACTIONS.values()), REHEARSE]
        names = ", ".join(verb.name for verb in all_verbs)
        verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB", help=names)
        for verb in all_verbs:
            described: dict[str, Any] = {"help": verb.help, "description": verb.help, "epilog": parser.epilog}
            added = verbs.add_parser(verb.name, **described, parents=[django], add_help=False)
            super().add_arguments(added)
            if verb is REHEARSE:
                added.add_argument("id", type=common.message_id, metavar="ID", help="the id of a message")
                common.add_json(added)
            else:
                _add_options(added, verb)

    def work(self, using: str, options: dict[str, Any]) -> None:
        if options["verb"] == REHEARSE.name:
            self._rehearse(using, options)
            return
        action = ACTIONS[options["verb"]]
        verb = action.verb
        for name in ("finished_after", "finished_before"):
            if isinstance(options.get(name), timedelta):
                options[name] = reads.now(using) - options[name]
        by_selectors = _by_selectors(verb, options)
        work = _Work(using, action, _times(options), options)
        rows = _narrowed(Message.objects.using(using).filter(state__in=sorted(verb.states)), options)
        if by_selectors:
            self.ask_about_selectors(rows, options)
        if options.get("to") is not None:
            self.ask_about_queues(using, [options["to"]], yes=options["yes"] or options["dry_run"])
        if by_selectors and verb.is_final:
            work.choose_finished()
        else:
            work.choose(selected(rows) if by_selectors else _ids(options["ids"]))
        verdicts = work.verdicts
        stopped: Exception | None = None
        if not options["dry_run"]:
            number = _done(verdicts)
            if number > 1 or (number and by_selectors):
                when = f": {work.when}" if work.when else ""
                self.confirm(f"This will {verb.name} {common.messages(number)}{when}.", yes=options["yes"])
            verdicts = work.done
            try:
                work.act()
            except Exception as error:
                if not verdicts:
                    raise
                # The report and the audit have what was done before the error.
                stopped = error
            ids = [] if by_selectors else work.ids
            signals.emit_action(
                Message,
                using,
                verb.name,
                _target(ids, options),
                message_id=ids[0] if len(ids) == 1 else None,
                reason=options["reason"],
                outcomes={verdict.value: number for verdict, number in verdicts.items() if number},
            )
        self._say(work, verdicts)
        if stopped is not None:
            raise stopped
        total = sum(verdicts.values())
        if left := total - _done(verdicts):
            raise CommandError(
                f"{left:,} of {common.messages(total)} cannot be changed: {verb.refusals}.", returncode=common.PARTIAL
            )

    def _rehearse(self, using: str, options: dict[str, Any]) -> None:
        try:
            found = rehearse(using, options["id"])
        except NotRehearsable as error:
            raise CommandError(str(error)) from error
        if options["json"]:
            wait = None if found.delay is None else found.delay.total_seconds()
            self.say_json(database=using, id=options["id"], **{**found._asdict(), "delay": wait})
        else:
            again = "" if found.delay is None else f" in {brief(found.delay.total_seconds())}"
            self.say(f"{found.outcome}{again}{found.error and f': {visible(found.error)}'}")
            for number, statement in enumerate(found.statements, 1):
                self.say(f"{number}. {visible(statement)}")
            if found.traceback:
                self.say(visible(found.traceback.rstrip()))
            self.say("All was rolled back.")
        if found.outcome != State.CONSUMED:
            raise CommandError(f"The handler of topic {found.topic} did not succeed.")

    def _say(self, work: _Work, verdicts: Counter[Verdict]) -> None:
        verb, is_dry = work.verb, work.options["dry_run"]
        if work.options["json"]:
            answers = {str(verdict): number for verdict, number in verdicts.items() if number}
            facts = {"due_to_come": work.to_come.number} if verb.keeps_due_times else {}
            self.say_json(database=work.using, dry_run=is_dry, answers=answers, **facts)
            return
        for line in work.passed_over():
            self.stderr.write(f"{line}.", self.style.WARNING)
        shown = {verdict: number for verdict, number in verdicts.items() if number}
        for verdict, number in shown.items():
            said = verb.lines[verdict]
            text = said.would if is_dry and said.would else said.text
            self.say(text.format(f"{number:,}"))
        if not shown:
            self.say("No message matches.")
        elif is_dry and work.when:
            self.say(work.when)


class _Work:
    """One verb for one selection of messages."""

    def __init__(self, using: str, action: Action, times: DueTimes, options: dict[str, Any]) -> None:
        self.using = using
        self.action = action
        self.verb = action.verb
        self.times = times
        self.options = options
        # What the verb would do now: the verdicts, and for a requeue the due times that are still to come.
        self.verdicts: Counter[Verdict] = Counter()
        self.to_come = ToCome()
        # What the verb did.
        self.done: Counter[Verdict] = Counter()
        self.ids: Sequence[int] = ()
        # With --key: the condition that a message has not handed its key over since it was chosen.
        self._as_chosen = ANY
        # A purge by selectors deletes along the index of finished messages: there may be too many to keep their ids.
        self._finished: QuerySet[Message] | None = None

    @property
    def when(self) -> str:
        """When the messages will be due, or where, in words."""
        words = _WHEN.get(self.verb.name)
        return "" if words is None else words(self.times, _done(self.verdicts), self.to_come)

    def choose(self, ids: Sequence[int]) -> None:
        """Choose these messages, and foresee the verdicts without writing anything."""
        self.ids = ids
        if self.options["key"] is not None and self.verb.states <= LIVE:
            chosen = Message.objects.using(self.using).filter(pk__in=list(ids), next_id__isnull=False)
            self._as_chosen = Q(next_id=None) | Q(pk__in=[*chosen.values_list("pk", flat=True)])
        for batch in chunks(ids, MOVES_PER_TRANSACTION):
            rows = Message.objects.using(self.using).filter(pk__in=list(batch))
            self.verdicts += self.action.foresee(rows)
            if self.verb.keeps_due_times:
                free = rows.filter(~actions.key_is_taken(self.using), state__in=sorted(self.verb.states))
                self.to_come += actions.to_come(free)
        self.verdicts[Verdict.NOT_FOUND] = len(ids) - sum(self.verdicts.values())

    def choose_finished(self) -> None:
        """Choose the finished messages that match the selectors, and do not hold their keys."""
        states = [State(state) for state in self.options["state"]] or sorted(self.verb.states)
        self._finished = _narrowed(purge.finished(self.using, states, 0.0), self.options)
        # With --yes nobody needs the number, and on a large table counting takes longer than many batches.
        if not self.options["yes"] or self.options["dry_run"]:
            self.verdicts[Verdict.PURGED] = purge.deletable(self._finished)[: self.options["oldest"]].count()

    def passed_over(self) -> list[str]:
        """Say which messages a purge leaves, because rows of other tables refer to them."""
        parts = [] if self._finished is None else [self._finished]
        if (self.done or self.verdicts)[Verdict.REFERRED_TO]:
            finished = Message.objects.using(self.using).filter(state__in=sorted(self.verb.states))
            parts = [finished.filter(pk__in=list(batch)) for batch in chunks(self.ids, MOVES_PER_TRANSACTION)]
        found: dict[str, list[int]] = {}
        for rows in parts:
            found = purge.referred_to(rows) | found
        return [purge.passed_over(name, ids) for name, ids in found.items()]

    def act(self) -> None:
        """Act batch by batch. A signal that has interrupted it raises."""
        with common.Interruptible() as interruption:
            for batch in self._batches():
                self.done.update(batch)
                if interruption.asked():
                    text = "Interrupted between two batches: the other messages were not changed."
                    raise CommandError(text, returncode=interruption.returncode)

    def _batches(self) -> Iterator[Counter[Verdict]]:
        if self._finished is not None:
            limit = self.options["oldest"] if self.options["yes"] else self.verdicts[Verdict.PURGED]
            for size in purge.purge(self._finished, limit=limit):
                yield Counter({Verdict.PURGED: size})
            return
        how: dict[str, Any] = {"times": self.times, "reason": self.options["reason"]}
        for answers in self.action.apply_in_batches(self.using, self.ids, **how, among=self._as_chosen):
            yield Counter(self._followed(answer, how).verdict for answer in answers)

    def _followed(self, answer: Answer, how: dict[str, Any]) -> Answer:
        """Act on the message that the key means now, instead of the chosen one, which has handed the key over since.

        Return the answer for the message that the action was for.
        """
        if answer.id is not None and answer.verdict == Verdict.NOT_FOUND and self._as_chosen:
            gone_on = Message.objects.using(self.using).filter(pk=answer.id, next_id__isnull=False).only("topic", "key")
            for message in gone_on:
                return self.action.apply_by_key(self.using, message.topic, message.key, **how)
        return answer


# --- options ----------------------------------------------------------------------------------------------------------


# What other queues call the verbs and the options.
_MEANT = {
    **dict.fromkeys(("abort", "delete", "revoke"), "cancel"),
    **dict.fromkeys(("restart", "retry"), "requeue"),
    "transfer": "move",
    "enqueue": "run",
    **dict.fromkeys(("clear", "empty", "flush", "prune"), "purge"),
    **dict.fromkeys(("--name", "--task"), "--topic"),
    **dict.fromkeys(("--to-queue", "--target", "--destination"), "--to"),
    **dict.fromkeys(("--all", "-a", "--status"), "a selector, such as --queue or --topic"),
}


def _add_options(parser: CommandParser, verb: Verb) -> None:
    parser.add_argument("ids", nargs="*", type=_id, metavar="ID", help="ids of messages; - reads ids from stdin")
    common.add_selectors(parser)
    if "finished" in verb.options:
        text = "only messages that finished {} (ISO 8601 with time zone, or an age such as 30d)"
        words = {"--finished-after": "at this time or later", "--finished-before": "before this time"}
        common.add_values(
            parser.add_argument, {flag: (common.moment_or_age, text.format(what)) for flag, what in words.items()}
        )
    if verb.is_final:
        common.add_values(
            parser.add_argument, {"--oldest": (common.positive, "of these messages only those that finished first")}
        )
    common.add_values(parser.add_argument, {"--key": (common.key, "only the message with this key")})
    parser.add_argument(
        "--state",
        action="append",
        choices=sorted(state.value for state in verb.states),
        default=[],
        help="only messages in this state (repeatable; default: every one of them)",
    )
    _add_times(parser, verb)
    parser.add_argument("--reason", default="", help="written to the log of each message")
    parser.add_argument("--dry-run", action="store_true", help="show what would be done, and write nothing")
    common.add_yes(parser)
    common.add_json(parser)


DUE_AT = "due at this time (ISO 8601 with time zone), or after this time from now, e.g. 2h, or now"
SHIFT = "due by this much later than now planned, e.g. 2h; or earlier, but not before now: --shift=-30m"
SPREAD = "spread the messages that get a new due time evenly over this time, e.g. 10m"
EXPIRES = "do not start them any more this long after their due times, e.g. 1h; or never"
TO = "have the messages wait in this queue"
PRIORITY = "and with this priority, from -100 to 100"


def _add_times(parser: CommandParser, verb: Verb) -> None:
    if "due_at" in verb.options:
        when = parser.add_mutually_exclusive_group(required="shift" in verb.options)
        shift: common.Values = {"--shift": (common.signed_span, SHIFT)} if "shift" in verb.options else {}
        common.add_values(when.add_argument, {"--due-at": (common.due_or_delay, DUE_AT), **shift})
    if "spread" in verb.options:
        common.add_values(parser.add_argument, {"--spread": (common.span, SPREAD)})
        parser.set_defaults(spread=NO_TIME)
    if "queue" in verb.options:
        common.add_values(
            parser.add_argument, {"--to": (common.queue_name, TO), "--priority": (common.priority, PRIORITY)}
        )
    if "expires" in verb.options:
        common.add_values(parser.add_argument, {"--expires": (_life, EXPIRES)})


def _life(text: str) -> timedelta | Literal[False]:
    """Read the time to live of a message; False: for ever."""
    return text != "never" and timedelta(seconds=common.lasting(text))


def _by_selectors(verb: Verb, options: dict[str, Any]) -> bool:
    """Tell whether selectors choose the messages. Raise ``CommandError`` unless either these or ids are given."""
    by_ids, by_selectors = bool(options["ids"]), any(options.get(name) for name in SELECTORS)
    if by_ids and by_selectors:
        raise common.wrong_usage("Give ids or selectors, not both.")
    if not by_ids and not by_selectors:
        hint = " To start a worker: run_delayq." if verb.name == "run" else ""
        raise common.wrong_usage(f"Give ids of messages, or selectors such as --topic and --queue.{hint}")
    if "queue" in verb.options and options["to"] is None and options["priority"] is None:
        raise common.wrong_usage("Say where to: --to QUEUE, --priority PRIORITY, or both.")
    if by_ids and options.get("oldest"):
        raise common.wrong_usage("--oldest goes with selectors such as --queue, and not with ids.")
    if by_selectors and verb.is_final and options["finished_before"] is None and not options["oldest"]:
        raise common.wrong_usage("A purge by selectors needs --finished-before, e.g. 30d, or --oldest, e.g. 10000.")
    return by_selectors


def _times(options: dict[str, Any]) -> DueTimes:
    """Return the due times, or the queue and the priority, that the messages get."""
    due = options.get("due_at")
    when: dict[str, Any] = {"delay" if isinstance(due, timedelta) else "due_at": due}
    others: dict[str, Any] = {name: options.get(name) for name in ("shift", "expires", "priority")}
    return DueTimes(**when, **others, queue=options.get("to"), spread=options.get("spread", NO_TIME))


def _narrowed(rows: QuerySet[Message], options: dict[str, Any]) -> QuerySet[Message]:
    """Return those of the messages that match the selectors."""
    return rows.filter(**{lookup: options[name] for name, lookup in SELECTORS.items() if options.get(name)})


def _target(ids: Sequence[int], options: dict[str, Any]) -> str:
    """Describe the messages in words, for the audit."""
    if len(ids) == 1:
        return f"message #{ids[0]}"
    if ids:
        return f"{len(ids)} messages: {', '.join(f'#{pk}' for pk in ids[:50])}{', …' if len(ids) > 50 else ''}"
    given = ((name.replace("_", " "), options.get(name)) for name in (*SELECTORS, "oldest"))
    return ", ".join(f"{name} {_in_words(value)}" for name, value in given if value)


def _done(verdicts: Counter[Verdict]) -> int:
    """Return the number of messages that the action changes."""
    return sum(number for verdict, number in verdicts.items() if verdict in DONE)


def _in_words(value: Any) -> str:
    return " or ".join(map(str, value)) if isinstance(value, list) else str(value)


def _id(text: str) -> int | str:
    try:
        return text if text == "-" else common.message_id(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(
            f"{error}; to name messages otherwise write --topic, --queue or --key"
        ) from None


def _ids(given: list[int | str]) -> list[int]:
    """Return the ids of the command line, and those of stdin if a ``-`` is among them."""
    ids = {number for number in given if isinstance(number, int)}
    if "-" in given:
        try:
            ids |= {common.message_id(word) for line in sys.stdin for word in line.split()}
        except argparse.ArgumentTypeError as error:
            raise common.wrong_usage(f"stdin: {error}") from error
    return sorted(ids)
