"""Shared by the commands: exit codes, types of arguments, selectors, questions, interruption."""

from __future__ import annotations

import argparse
import getpass
import json
import os
import re
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timedelta
from types import FrameType
from typing import Any, Self, TypeVar

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import DatabaseError, InterfaceError, connections, router
from django.db.models import QuerySet
from django.utils.dateparse import parse_datetime

from ..broker import RedisBroker, check_settings, index
from ..core import actors, values
from ..core.bounds import PRIORITIES
from ..core.clock import NO_TIME, iso
from ..core.exceptions import BrokerUnavailable, InvalidMessage, UnusableBroker
from ..core.findings import Cause
from ..core.names import near
from ..core.text import shown
from ..inspector import worker_list
from ..inspector.numbers import Capped
from ..models import Message
from ..project import validation
from ..record import reads
from ..record.sql import commits_nothing, unsupported
from ..record.sql.troubles import Trouble, in_words, trouble

# The version of the JSON that --json writes.
SCHEMA = 1

USAGE = 2
PROBLEMS = Cause.PROBLEM.value
PARTIAL = 4
UNREACHABLE = Cause.UNREACHABLE.value
MISCONFIGURED = Cause.MISCONFIGURED.value

MEANINGS = {
    0: "done, healthy, or nothing to do",
    1: "an error, or the answer to a question was no",
    USAGE: "wrong usage, or a question but no terminal to ask it on",
    PROBLEMS: "problems found",
    PARTIAL: "some messages could not be changed",
    UNREACHABLE: "Redis or the database does not answer, or Redis cannot be used",
    MISCONFIGURED: "wrong settings, pending migrations, a missing right, one node of a Redis Cluster, another "
    "database's Redis, or no POSIX system",
    130: "interrupted by SIGINT (143: by SIGTERM), and what was done until then is done",
}


# How an error shows a moment.
MOMENT = "2030-01-31T12:00:00Z"

# The characters that commands write by themselves, and what replaces them in an output that has ASCII only.
_IN_ASCII = str.maketrans({"×": "x", "…": "...", "█": "#", "±": "+-"})


class DelayqCommand(BaseCommand, ABC):
    """A command that works on one database alias. It writes data to stdout, questions and warnings to stderr.

    An error of the database, of Redis or of the settings ends the command with an exit code of its own.
    """

    requires_system_checks = []
    exits: tuple[int, ...] = (0, 1, USAGE, UNREACHABLE, MISCONFIGURED)

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        codes = "; ".join(f"{code} {MEANINGS[code]}" for code in self.exits)
        return super().create_parser(prog_name, subcommand, epilog=f"Exit codes: {codes}.", **kwargs)

    def add_arguments(self, parser: CommandParser) -> None:
        add_database(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        using = database(options)
        name = type(self).__module__.rpartition(".")[2]
        with errors_as_exit_codes(), actors.acting_as(f"command:{name} {_user()}@{actors.host()}"):
            check_settings()
            self.work(using, options)

    @abstractmethod
    def work(self, using: str, options: dict[str, Any]) -> None:
        """Do the work of the command, on the database alias ``using``."""

    def say(self, text: str) -> None:
        """Write a line of data to stdout, as far as its encoding has the characters."""
        encoding = getattr(self.stdout, "encoding", None) or "utf-8"
        try:
            text.encode(encoding)
        except UnicodeEncodeError:
            text = text.translate(_IN_ASCII).encode(encoding, "backslashreplace").decode(encoding)
        self.stdout.write(text)

    def say_json(self, **facts: Any) -> None:
        """Write one JSON object to stdout."""
        self.stdout.write(json.dumps({"schema": SCHEMA, **facts}, default=_plain))

    def confirm(self, what: str, *, yes: bool) -> None:
        """Ask before an action that cannot be undone. Raises ``CommandError`` for a no, and without a terminal."""
        if yes:
            return
        if not sys.stdin.isatty():
            raise wrong_usage(
                f"{what} Nothing was done: there is no terminal to ask on. Add --yes to go ahead without a question."
            )
        self.stderr.write(f"{what} Go ahead? [y/N] ", self.style.WARNING, ending="")
        self.stderr.flush()
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            raise CommandError("Nothing was done.")

    def ask_about(self, unknown: Mapping[str, str | None], *, yes: bool) -> None:
        """Report names that nothing knows, and ask before going on if a known name is like one of them.

        ``unknown`` has a sentence for each name, with the known name that is like it, or None. With ``yes`` nothing is
        asked, but the names are reported all the same.
        """
        asked = [f"{text}. Did you mean {like}?" for text, like in unknown.items() if like is not None]
        for told in [f"{text}." for text, like in unknown.items() if like is None] + asked * yes:
            self.stderr.write(told, self.style.WARNING)
        if asked:
            self.confirm(" ".join(asked), yes=yes)

    def ask_about_queues(
        self, using: str, names: Iterable[str], *, yes: bool, meant: Collection[str] | None = None
    ) -> None:
        """Ask about queues that nothing knows and that are like one that was ``meant``, by default like a known one."""
        known = worker_list.known_queues(using)
        text = "Nothing knows the queue {}: no setting, handler or live worker names it, and no message waits in it"
        among = known if meant is None else meant
        self.ask_about({text.format(name): near(name, among) for name in names if name not in known}, yes=yes)

    def ask_about_selectors(self, rows: QuerySet[Message], options: Mapping[str, Any]) -> None:
        """Ask about the names of --queue and --topic that none of these messages has, and that nothing knows."""
        using, unknown = rows.db, dict[str, str | None]()
        for what, names in (("queue", options["queue"]), ("topic", options["topic"])):
            if not names:
                continue
            known = worker_list.known_queues(using)
            if what == "topic":
                known = worker_list.known_topics(worker_list.list_workers(using, reads.now(using)))
            for name in sorted(set(names) - known):
                if not rows.filter(**{what: name}).exists():
                    unknown[f"No message matches the {what} {name}, and nothing knows it"] = near(name, known)
        self.ask_about(unknown, yes=options["yes"] or options["dry_run"])


def _plain(value: Any) -> Any:
    """Return a value that JSON lacks in a form that it has: times in ISO 8601, capped numbers, and the rest as text."""
    if isinstance(value, datetime):
        return iso(value)
    return value.as_json() if isinstance(value, Capped) else str(value)


@contextmanager
def errors_as_exit_codes() -> Iterator[None]:
    """Turn an error of the database, of Redis, the settings or a call into a ``CommandError`` with an exit code."""
    try:
        yield
    except UnusableBroker as error:
        raise CommandError(str(error), returncode=MISCONFIGURED) from error
    except BrokerUnavailable as error:
        raise CommandError(f"{error.what}: {error}", returncode=UNREACHABLE) from error
    except ImproperlyConfigured as error:
        raise CommandError(str(error), returncode=MISCONFIGURED) from error
    except InvalidMessage as error:
        raise wrong_usage(str(error)) from error
    except (DatabaseError, InterfaceError) as error:
        raise CommandError(in_words(error), returncode=_EXIT_CODES.get(trouble(error), 1)) from error


def wrong_usage(text: str) -> CommandError:
    """Return the error for options that do not go together, or do not fit the project."""
    return CommandError(text, returncode=USAGE)


_EXIT_CODES = {
    Trouble.AWAY: UNREACHABLE,
    Trouble.OUTDATED: MISCONFIGURED,
    Trouble.FORBIDDEN: MISCONFIGURED,
}


@contextmanager
def broker_if_any(using: str) -> Iterator[RedisBroker | None]:
    """Give a broker for the project's Redis, and close it; None when the settings name no Redis."""
    broker = index(using)
    try:
        yield broker
    finally:
        if broker is not None:
            broker.close()


def required_broker(using: str) -> RedisBroker:
    """Return a broker for the project's Redis. Raises ``CommandError`` when the settings name no Redis."""
    broker = index(using)
    if broker is None:
        raise CommandError(
            "DELAYQ['REDIS'] is None: workers ask the database for due messages, and there is no Redis to work on.",
            returncode=MISCONFIGURED,
        )
    return broker


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):
        return f"uid {os.getuid()}" if hasattr(os, "getuid") else "unknown"


# --- arguments --------------------------------------------------------------------------------------------------------


def give_hints(parser: CommandParser, meant: Mapping[str, str]) -> None:
    """Have a parser say what to write instead of words that other queues have. An empty text: the word is left out."""
    refuse = parser.error
    parser.error = lambda message: refuse(_with_hints(message, meant))  # type: ignore[method-assign]


def _with_hints(error: str, meant: Mapping[str, str]) -> str:
    found = re.search(r"(?:unrecognized arguments|invalid choice): (.*?)(?: \(choose from|$)", error)
    words = dict.fromkeys(word.strip("'").partition("=")[0] for word in found[1].split()) if found else ()
    hints = [
        f"instead of {word} write {meant[word]}" if meant[word] else f"leave out {word}"
        for word in words
        if word in meant
    ]
    return "; ".join([error, *hints])


def moment(text: str) -> datetime:
    """Read an aware moment in ISO 8601."""
    try:
        found = parse_datetime(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not a time: {text!r}: {error}") from None
    if found is None:
        raise argparse.ArgumentTypeError(f"not a time: {text!r}; write it as {MOMENT}")
    if found.tzinfo is None:
        raise argparse.ArgumentTypeError(f"{text!r} has no time zone; write {found.isoformat()}Z, or +02:00 for Z")
    if found.year < 1970:
        raise argparse.ArgumentTypeError(f"{text!r} is before 1970")
    return checked(values.moment, found)


T = TypeVar("T")


def checked(check: Callable[..., T], *given: Any, **bounds: float) -> T:
    """Return what a check returns. Raises ``ArgumentTypeError`` with the words of its ``ValueError``."""
    try:
        return check(*given, **bounds)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def duration(text: str) -> float:
    """Read a duration from 0 to 100 years, such as ``90s``. Return seconds."""
    return checked(values.span, text)


def lasting(text: str) -> float:
    """Read a duration that is not 0. Return seconds."""
    return checked(values.span, text, lowest=values.SHORTEST)


def span(text: str) -> timedelta:
    """Read a time from 0 to 100 years, such as ``90s``."""
    return timedelta(seconds=duration(text))


def signed_span(text: str) -> timedelta:
    """Read a time that may be negative, such as ``-30m``."""
    return -span(text.removeprefix("-")) if text.startswith("-") else span(text)


def due(text: str) -> datetime:
    """Read a due time that a message may have: an aware moment in ISO 8601, not in the past."""
    return checked(validation.due, moment(text), "the due time")


def due_or_delay(text: str) -> datetime | timedelta:
    """Read a time to come: a due time, or a time from now such as ``2h`` or ``now``."""
    if text == "now":
        return NO_TIME
    return due(text) if _is_moment(text) else _span_where_moments_are(text)


def moment_or_age(text: str) -> datetime | timedelta:
    """Read a time in the past: an aware moment in ISO 8601, or how long ago it was, such as ``30d``."""
    return moment(text) if _is_moment(text) else _span_where_moments_are(text)


def _span_where_moments_are(text: str) -> timedelta:
    try:
        return span(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}; write a moment as {MOMENT}") from None


def _is_moment(text: str) -> bool:
    return re.match(r"\d+-", text) is not None


def positive(text: str) -> int:
    """Read a whole number of 1 or more."""
    return checked(values.whole, _number(text), 1)


def priority(text: str) -> int:
    """Read a priority."""
    return checked(values.whole, _number(text), *PRIORITIES)


def count(text: str) -> int:
    """Read a whole number of 0 or more."""
    return checked(values.whole, _number(text), 0)


def _number(text: str) -> int | str:
    """Return the number for which a text stands, or the text itself, which no check takes for a number."""
    return int(text) if re.fullmatch(r"-?[0-9]{1,18}", text) else text


def memory(text: str) -> int:
    """Read an amount of memory with its unit, such as ``200M`` or ``1.5G``. Return bytes."""
    found = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)([KMG])(?:i?B)?", text, re.IGNORECASE)
    size = int(float(found[1]) * 1024 ** (" KMG".index(found[2].upper()))) if found else 0
    if not size:
        raise argparse.ArgumentTypeError(f"not an amount of memory: {text!r}; write it as 200M or 1.5G")
    return size


def message_id(text: str) -> int:
    """Read the id of a message."""
    try:
        return values.row_id(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"not the id of a message: {shown(text)}") from None


def queue_name(text: str) -> str:
    """Read the name of a queue."""
    return checked(validation.queue, text)


def topic_name(text: str) -> str:
    """Read the name of a topic."""
    return checked(validation.topic, text)


def key(text: str) -> str | None:
    """Read the key of a message."""
    return checked(validation.key, text)


def database(options: Mapping[str, Any]) -> str:
    """Return the database alias of the messages.

    Raises ``CommandError`` for one that cannot keep any, and for one to which this process would commit nothing.
    """
    given: str | None = options["database"]
    using = router.db_for_write(Message) if given is None else given
    if using not in connections:
        like = near(using, connections)
        hint = f" Did you mean {like}?" if like else ""
        raise wrong_usage(f"There is no database {using!r} in DATABASES.{hint}")
    reason = unsupported(using) or commits_nothing(using)
    if reason is not None:
        raise CommandError(reason, returncode=MISCONFIGURED)
    return using


def require_routed(using: str) -> None:
    """Raise ``CommandError`` for another database than that of the routers, which the HTTP door uses."""
    routed = router.db_for_write(Message)
    if using != routed:
        raise wrong_usage(f"The HTTP door uses the database of the routers, {routed}: --database can name no other.")


# The names in the help of the values that these functions read.
_METAVARS: dict[Callable[[str], Any], str] = {
    **dict.fromkeys((span, signed_span, duration, lasting, due, due_or_delay, moment_or_age), "TIME"),
    memory: "SIZE",
    queue_name: "QUEUE",
    topic_name: "TOPIC",
}


# Options with a value each: by flag, how the value is read, and the help.
Values = Mapping[str, tuple[Callable[[str], Any], str]]


def add_values(add: Callable[..., argparse.Action], options: Values) -> None:
    """Add options with a value each, by the ``add_argument`` of a parser or of a group of its options."""
    for flag, (read, text) in options.items():
        add(flag, type=read, metavar=_METAVARS.get(read), help=text)


def add_database(parser: CommandParser) -> None:
    """Add the option --database."""
    parser.add_argument("--database", help="the database alias of the messages")


def add_selectors(parser: CommandParser) -> None:
    """Add the options --queue, --topic, --due-after and --due-before."""
    parser.add_argument(
        "--queue", action="append", type=queue_name, default=[], help="only messages in this queue (repeatable)"
    )
    parser.add_argument(
        "--topic", action="append", type=topic_name, default=[], help="only messages of this topic (repeatable)"
    )
    parser.add_argument(
        "--due-after", type=moment, help="only messages that are due at this time or later (ISO 8601 with time zone)"
    )
    parser.add_argument("--due-before", type=moment, help="only messages that are due before this time")


def add_end(parser: CommandParser, what: str, reason: str) -> None:
    """Add the options --until and --reason, for a pause or an override."""
    help_ = f"{what}end it at this time (ISO 8601 with time zone), or after this time from now, e.g. 30m"
    parser.add_argument("--until", type=due_or_delay, metavar="TIME", help=help_)
    parser.add_argument("--reason", default="", help=reason)


def end_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return --until as calls name it."""
    end = options["until"]
    return {"duration" if isinstance(end, timedelta) else "until": end}


def add_yes(parser: CommandParser) -> None:
    """Add the option --yes, which is also called --no-input."""
    parser.add_argument("--yes", "--no-input", action="store_true", dest="yes", help="go ahead without a question")


def add_json(parser: CommandParser) -> None:
    """Add the option --json."""
    parser.add_argument("--json", action="store_true", help="write one JSON object to stdout")


def messages(number: int, kind: str = "") -> str:
    """Return a number of messages in words: ``"1 message"``, ``"2,000 finished messages"``."""
    return f"{number:,} {kind and kind + ' '}message{'' if number == 1 else 's'}"


# --- interruption -----------------------------------------------------------------------------------------------------


class Interruptible:
    """Catches SIGINT and SIGTERM: the first asks to stop after the current batch, the second ends the process."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._former: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._former[number] = signal.signal(number, self._caught)
            except ValueError:
                # Only the main thread can catch signals. In another thread nobody interrupts the command.
                break
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _caught(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.signal = number

    def asked(self) -> bool:
        """Return whether a signal has asked to stop."""
        return self.signal is not None

    @property
    def returncode(self) -> int:
        """The exit code that a shell expects after the signal."""
        return 128 + (self.signal or 0)
