"""What the commands share: exit codes, selectors, questions, a progress bar, and how they are interrupted."""

from __future__ import annotations

import argparse
import getpass
import json
import os
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from types import FrameType
from typing import Any, Self

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, CommandParser, OutputWrapper
from django.db import InterfaceError, OperationalError, ProgrammingError, connections, router
from django.utils.dateparse import parse_datetime

from .. import actors, conf, durations, signals, validation
from ..broker import index
from ..broker.base import Index
from ..exceptions import BrokerUnavailable, ForeignBroker, InvalidMessage
from ..models import Message

SCHEMA = 1

USAGE = 2
PROBLEMS = 3
PARTIAL = 4
UNREACHABLE = 69
MISCONFIGURED = 78

MEANINGS = {
    0: "done, or nothing to do",
    1: "error",
    USAGE: "wrong usage, or would have had to ask without a terminal",
    PROBLEMS: "problems found",
    PARTIAL: "some were left as they are",
    UNREACHABLE: "Redis or the database does not answer",
    MISCONFIGURED: "wrong settings, pending migrations, or the Redis of another database",
    130: "interrupted (143 by SIGTERM)",
}


class DelayqCommand(BaseCommand, ABC):
    """A command on one database alias. Data goes to stdout, progress and warnings to stderr.

    What goes wrong outside ends it with an exit code that says so.
    """

    requires_system_checks = []
    exits: tuple[int, ...] = (0, 1, USAGE, UNREACHABLE, MISCONFIGURED)

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        codes = "; ".join(f"{code} {MEANINGS[code]}" for code in self.exits)
        return super().create_parser(prog_name, subcommand, epilog=f"Exit codes: {codes}.", **kwargs)

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--database", help="the database alias to work on")

    def handle(self, *args: Any, **options: Any) -> None:
        using = options["database"] or router.db_for_write(Message)
        if using not in connections:
            raise CommandError(f"There is no database {using!r}.", returncode=USAGE)
        name = type(self).__module__.rpartition(".")[2]
        with outside_world(), actors.acting_as(f"command:{name} {_user()}@{actors.host()}"):
            conf.get()
            self.work(using, options)

    @abstractmethod
    def work(self, using: str, options: dict[str, Any]) -> None:
        """Do it."""

    def say(self, text: str) -> None:
        """Write a line of data."""
        self.stdout.write(text)

    def say_json(self, **facts: Any) -> None:
        """Write one JSON object."""
        self.stdout.write(json.dumps({"schema": SCHEMA, **facts}, default=str))

    def record_action(
        self,
        using: str,
        action: str,
        target: str,
        *,
        message_id: int | None = None,
        reason: str = "",
        outcomes: Mapping[str, int] | None = None,
    ) -> None:
        """Send the signal ``operator_action``: what this command did to what (both in words), and the outcomes."""
        signals.emit(
            signals.operator_action,
            Message,
            action=action,
            target=target,
            message_id=message_id,
            reason=reason,
            outcomes=dict(outcomes or {}),
            actor=actors.current(),
            using=using,
        )

    def confirm(self, what: str, *, yes: bool) -> None:
        """Ask before something that cannot be taken back. Without a terminal it is refused, not asked."""
        if yes:
            return
        if not sys.stdin.isatty():
            raise CommandError(f"{what} Add --yes to do it without being asked.", returncode=USAGE)
        self.stderr.write(f"{what} Go on? [y/N] ", self.style.WARNING, ending="")
        self.stderr.flush()
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            raise CommandError("Nothing was done.")


@contextmanager
def outside_world() -> Iterator[None]:
    """Turn what others raise into a line and an exit code."""
    try:
        yield
    except ForeignBroker as error:
        raise CommandError(str(error), returncode=MISCONFIGURED) from error
    except BrokerUnavailable as error:
        raise CommandError(f"Redis does not answer: {error}", returncode=UNREACHABLE) from error
    except ImproperlyConfigured as error:
        raise CommandError(str(error), returncode=MISCONFIGURED) from error
    except (OperationalError, InterfaceError, ProgrammingError) as error:
        raise _database_error(error) from error


def _database_error(error: Exception) -> CommandError:
    if isinstance(error, ProgrammingError) or "no such table" in str(error):
        return CommandError(f"The tables are not there or are old: run migrate. {error}", returncode=MISCONFIGURED)
    return CommandError(f"The database does not answer: {error}", returncode=UNREACHABLE)


def required_broker(using: str) -> Index:
    """The project's Redis. Raises ``CommandError`` when it has none."""
    broker = index(using)
    if broker is None:
        raise CommandError(
            "DELAYQ['REDIS'] is None: messages are delivered by query, and there is nothing in Redis.",
            returncode=MISCONFIGURED,
        )
    return broker


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):
        return f"uid {os.getuid()}" if hasattr(os, "getuid") else "unknown"


# --- words of the command line ----------------------------------------------------------------------------------------


def moment(text: str) -> datetime:
    """An aware moment in ISO 8601."""
    try:
        found = parse_datetime(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not a time: {text!r}: {error}") from None
    if found is None:
        raise argparse.ArgumentTypeError(f"not a time: {text!r}; write it as 2030-01-31T12:00:00Z")
    if found.tzinfo is None:
        raise argparse.ArgumentTypeError(f"{text!r} has no time zone; write {text}Z or {text}+02:00")
    return found


def span(text: str) -> float:
    """A duration of 0 or more, in seconds."""
    try:
        found = durations.seconds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if found < 0:
        raise argparse.ArgumentTypeError("must not be negative")
    return found


def positive(text: str) -> int:
    """A whole number of 1 or more."""
    found = int(text)
    if found < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return found


def count(text: str) -> int:
    """A whole number of 0 or more."""
    found = int(text)
    if found < 0:
        raise argparse.ArgumentTypeError("must not be negative")
    return found


def message_id(text: str) -> int:
    """The id of a message."""
    if not text.isascii() or not text.isdigit() or not 0 < int(text[:20]) < 2**63:
        raise argparse.ArgumentTypeError(f"not the id of a message: {text[:40]!r}")
    return int(text)


def queue_name(text: str) -> str:
    """The name of a queue."""
    try:
        return validation.queue(text)
    except InvalidMessage as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def topic_name(text: str) -> str:
    """The name of a topic."""
    try:
        return validation.topic(text)
    except InvalidMessage as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_selectors(parser: CommandParser) -> None:
    """--queue, --topic, --due-after, --due-before."""
    parser.add_argument("--queue", action="append", type=queue_name, default=[], help="only this queue (repeatable)")
    parser.add_argument("--topic", action="append", type=topic_name, default=[], help="only this topic (repeatable)")
    parser.add_argument("--due-after", type=moment, help="only what is due from this time on (ISO 8601 with zone)")
    parser.add_argument("--due-before", type=moment, help="only what is due before this time")


def add_yes(parser: CommandParser) -> None:
    """--yes, under both of its names."""
    parser.add_argument("--yes", "--no-input", action="store_true", dest="yes", help="do not ask")


def add_json(parser: CommandParser) -> None:
    """--json."""
    parser.add_argument("--json", action="store_true", help="write one JSON object to stdout")


def iso(when: datetime | None) -> str | None:
    """A moment as UTC in ISO 8601."""
    return None if when is None else when.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


# --- on the way -------------------------------------------------------------------------------------------------------


class Interruptible:
    """The first SIGINT or SIGTERM asks to stop after the current batch; the second ends the process at once."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._former: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._former[number] = signal.signal(number, self._caught)
            except ValueError:
                # Not in the main thread: then nobody interrupts us.
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
        """Whether to stop."""
        return self.signal is not None

    @property
    def returncode(self) -> int:
        return 128 + (self.signal or 0)


class Bar:
    """How far a command has come, on a terminal; silent elsewhere. ``total`` 0: not known."""

    WIDTH = 30

    def __init__(self, stream: OutputWrapper, total: int, verbosity: int) -> None:
        self._stream = stream
        self._on = verbosity > 0 and stream.isatty()
        self._total = total
        self._done = 0
        self._began = time.monotonic()
        self._shown = 0.0

    def __call__(self, done: int) -> None:
        """So many more."""
        self._done += done
        now = time.monotonic()
        if self._on and now - self._shown > 0.1:
            self._shown = now
            self._draw(now)

    def _draw(self, now: float) -> None:
        rate = f"{self._done / max(0.001, now - self._began):,.0f}/s"
        self._stream.write(f"\r{self._share()}  {rate} ", ending="")
        self._stream.flush()

    def _share(self) -> str:
        if not self._total:
            return f"{self._done:,}"
        share = min(1.0, self._done / self._total)
        filled = round(share * self.WIDTH)
        return f"{'█' * filled}{'░' * (self.WIDTH - filled)} {share:4.0%}  {self._done:,} of {self._total:,}"

    def close(self) -> None:
        """Leave the last state on a line of its own."""
        if self._on:
            self._draw(time.monotonic())
            self._stream.write("")
