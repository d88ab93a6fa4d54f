"""``manage.py delayq_check``: check whether all is well, compare the record with Redis, list the handlers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.db import DatabaseError, InterfaceError

from ...core.clock import iso
from ...core.durations import brief
from ...core.findings import Level
from ...core.names import near
from ...core.retry import RetryPolicy
from ...inspector import consistency, diagnostics
from ...inspector.consistency import ConsistencyCheck, Mismatches
from ...inspector.diagnostics import Thresholds
from ...inspector.stats import limit_facts
from ...inspector.worker_list import known_queues, list_workers, topics_without_handler
from ...project import conf, registry
from ...project.registry import Handler
from ...record import reads
from ...record.sql.troubles import in_words
from ...restore.horizon import writable_server
from .. import _common as common

THRESHOLDS = {
    "--min-workers": (common.count, "health: critical with fewer live workers (default 1)"),
    "--max-overdue-age": (common.duration, "health: critical when a message has been due for longer (default 60s)"),
    "--max-dead": (common.count, "health: critical with more dead messages (default: no limit)"),
    "--max-limited-age": (
        common.duration,
        "health: critical when a message has waited longer for a limit (default: never; a warning after 1h)",
    ),
}
# The subjects of checks, and the options that belong to one subject alone.
WHAT: dict[str, tuple[str, ...]] = {
    "health": ("min_workers", "max_overdue_age", "max_dead", "max_limited_age"),
    "redis": ("queue", "fix"),
    "record": (),
    "handlers": (),
}


class Command(common.DelayqCommand):
    help = (
        "health (default): check the database, the migrations, Redis, the workers and the overdue messages, and write "
        "one line for each; a warning leaves the exit code 0. redis: compare the record with Redis, and find messages "
        "that are missing in Redis, ids that are extra there, due times that are different, and running messages whose "
        "lease ran out long ago. A mismatch counts if it is still there after DELAYQ['GRACE'], because a message may "
        "be on its way. Workers repair all of this by themselves in time; --fix repairs it at once, except for running "
        "messages. record: read the rows of all messages, and find those whose columns contradict each other, which "
        "somebody else has written. handlers: list the topics of this project with their functions and options, and "
        "the limits of queues, and warn of topics of waiting messages that have no handler here and in no live worker."
    )
    exits = (0, 1, 2, 3, 69, 78)

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "what", nargs="?", choices=tuple(WHAT), default="health", metavar="WHAT", help=", ".join(WHAT)
        )
        common.add_values(parser.add_argument, THRESHOLDS)
        parser.add_argument(
            "--queue", action="append", type=common.queue_name, default=[], help="redis: only this queue (repeatable)"
        )
        parser.add_argument(
            "--fix", action="store_true", help="redis: put ids that are missing or different, and remove extra ids"
        )
        common.add_json(parser)

    def work(self, using: str, options: dict[str, Any]) -> None:
        for what, names in WHAT.items():
            for name in names if what != options["what"] else ():
                if options[name] not in (None, []) and options[name] is not False:
                    raise common.wrong_usage(f"--{name.replace('_', '-')} belongs to {what}.")
        others = {"redis": compare, "record": check_rows, "handlers": list_handlers}
        others.get(options["what"], check_health)(self, using, options)

    def word(self, level: Level) -> str:
        """Return the word for a level, in its colour."""
        styles = {Level.OK: self.style.SUCCESS, Level.WARN: self.style.WARNING, Level.CRITICAL: self.style.ERROR}
        return styles.get(level, str)(f"{level.name:<8}")


# --- health -----------------------------------------------------------------------------------------------------------


def check_health(command: Command, using: str, options: dict[str, Any]) -> None:
    """Print all findings. Raise ``CommandError`` when one is critical."""
    given = {name: options[name] for name in WHAT["health"] if options[name] is not None}
    with common.broker_if_any(using) as broker:
        findings = diagnostics.check(using, broker, Thresholds(**given))
    level = max(finding.level for finding in findings)
    if options["json"]:
        command.say_json(
            database=using,
            level=level.name.lower(),
            checks=[{"name": f.name, "level": f.level.name.lower(), "detail": f.text} for f in findings],
        )
    else:
        for finding in findings:
            command.say(f"{command.word(finding.level)} {finding.name}: {finding.text}")
    if (cause := diagnostics.worst(findings)) is not None:
        bad = sum(finding.level == Level.CRITICAL for finding in findings)
        raise CommandError(f"{bad} of {len(findings)} checks found a critical problem.", returncode=int(cause))


# --- redis ------------------------------------------------------------------------------------------------------------


def compare(command: Command, using: str, options: dict[str, Any]) -> None:
    """Compare all queues, or those of --queue, and repair them with --fix. Raise ``CommandError`` for problems."""
    found: dict[str, Mismatches] = {}
    with closing(common.required_broker(using)) as broker:
        writable_server(broker)
        for queue in options["queue"]:
            if not consistency.is_known(using, broker, queue):
                like = near(queue, known_queues(using))
                raise common.wrong_usage(
                    f"There is no queue {queue}: neither the record nor Redis has a message to deliver in it, "
                    f"and no setting or handler names it.{f' Did you mean {like}?' if like else ''}"
                )
        for queue in options["queue"] or consistency.queues(using, broker):
            found[queue] = ConsistencyCheck(using, broker, queue, fix=options["fix"]).run()
    stuck = consistency.stuck(using, options["queue"])
    if options["json"]:
        command.say_json(
            database=using,
            fixed=options["fix"],
            queues={name: _plain_mismatches(one) for name, one in found.items()},
            stuck={"count": stuck.count, "lease_ran_out_at": iso(stuck.oldest)},
        )
    else:
        _say(command, found, stuck)
    problems = sum(one.total - one.fixed for one in found.values()) + stuck.count
    if problems:
        raise CommandError(
            f"{problems:,} problem{'' if problems == 1 else 's'} found."
            f"{'' if options['fix'] else ' Run delayq_check redis --fix to repair mismatches now.'}",
            returncode=common.PROBLEMS,
        )


def _say(command: Command, found: dict[str, Mismatches], stuck: consistency.Stuck) -> None:
    for name, one in found.items():
        counts = ", ".join(f"{number:,} {mismatch}" for mismatch, number in one.counts.items() if number)
        fixed = f"; {one.fixed:,} fixed" if one.fixed else ""
        command.say(f"{name}: {counts or 'no mismatch'}{fixed}")
        for mismatch, ids in one.examples.items():
            if ids:
                command.say(f"  {mismatch}: {', '.join(map(str, ids))}{' …' * (one.counts[mismatch] > len(ids))}")
    if stuck.count:
        command.say(
            f"Stuck: {common.messages(stuck.count, 'running')} without a lease; the first one ran out at "
            f"{iso(stuck.oldest)}. Start a worker with the role reaper: it takes these messages back."
        )


def _plain_mismatches(one: Mismatches) -> dict[str, Any]:
    return {
        "compared": one.compared,
        "fixed": one.fixed,
        **{str(mismatch): number for mismatch, number in one.counts.items()},
        "examples": {str(mismatch): ids for mismatch, ids in one.examples.items()},
    }


# --- record -----------------------------------------------------------------------------------------------------------


def check_rows(command: Command, using: str, options: dict[str, Any]) -> None:
    """Look for rows of messages that contradict themselves. Raise ``CommandError`` when there are some."""
    found = consistency.inconsistent(using)
    if options["json"]:
        command.say_json(database=using, inconsistent=found.count, examples=found.examples)
    elif not found.count:
        command.say("No row of a message contradicts itself.")
    if found.count:
        ids = ", ".join(map(str, found.examples)) + " …" * (found.count > len(found.examples))
        rows = (
            "the row of 1 message contradicts itself"
            if found.count == 1
            else (f"the rows of {found.count:,} messages contradict themselves")
        )
        raise CommandError(
            f"State, lease, end or counts in {rows}: {ids}. This package writes no such row: find out who writes to "
            "delayq_message, and cancel or purge these messages.",
            returncode=common.PROBLEMS,
        )


# --- handlers ---------------------------------------------------------------------------------------------------------

HEAD = ("TOPIC", "FUNCTION", "QUEUE", "RETRY", "TIMEOUT", "LEASE", "LIMIT", "TRANSACTIONAL")


def list_handlers(command: Command, using: str, options: dict[str, Any]) -> None:
    """List the handlers, and warn of topics of waiting messages that have none here and in no live worker."""
    handlers = [handler for _topic, handler in sorted(registry.handlers().items())]
    queue_limits = sorted((conf.get().LIMITS or {}).items())
    unhandled = _unhandled(command, using)
    if options["json"]:
        command.say_json(
            database=using,
            handlers=[_plain_handler(handler) for handler in handlers],
            queue_limits={queue: limit_facts(limit) for queue, limit in queue_limits},
            unhandled=None if unhandled is None else [*unhandled],
        )
    elif handlers:
        for line in _table([HEAD, *map(_row, handlers)]):
            command.say(line)
    else:
        command.say("This project has no handlers.")
    if queue_limits and not options["json"]:
        command.say("")
        for line in _table([("QUEUE", "LIMIT"), *((queue, str(limit)) for queue, limit in queue_limits)]):
            command.say(line)
    for topic, like in (unhandled or {}).items():
        meant = f" Did you mean {like}?" if like else ""
        text = f"Messages of topic {topic} wait, and no handler is known for it.{meant}"
        command.stderr.write(text, command.style.WARNING)


def _unhandled(command: Command, using: str) -> dict[str, str | None] | None:
    """Return the topics that nobody handles; None when the database does not answer, which is no error here."""
    try:
        return topics_without_handler(using, list_workers(using, reads.now(using)))
    except (DatabaseError, InterfaceError) as error:
        command.stderr.write(f"Waiting messages were not looked at: {in_words(error)}", command.style.WARNING)
        return None


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _row(handler: Handler) -> tuple[str, ...]:
    return (
        handler.topic,
        f"{handler.name} (async)" if handler.is_async else handler.name,
        registry.default_queue(handler.topic),
        _described(handler.retry),
        "none" if handler.timeout is None else brief(handler.timeout),
        brief(handler.lease),
        _limit(handler),
        "yes" if handler.transactional else "no",
    )


def _limit(handler: Handler) -> str:
    """Return the limit of a topic in words."""
    if handler.limit is None:
        return "none"
    return f"{handler.limit}, each key" if handler.limit_key else str(handler.limit)


def _plain_handler(handler: Handler) -> dict[str, Any]:
    try:
        policy: dict[str, Any] | str = handler.retry.to_json()
    except ValueError:
        # A policy that is a function or names exceptions cannot be stored as JSON: only its words are shown.
        policy = _described(handler.retry)
    return {
        "topic": handler.topic,
        "function": handler.name,
        "async": handler.is_async,
        "queue": registry.default_queue(handler.topic),
        "retry": policy,
        "timeout": handler.timeout,
        "lease": handler.lease,
        "limit": limit_facts(handler.limit),
        "limit_by_key": handler.limit_key is not None,
        "transactional": handler.transactional,
    }


def _described(policy: RetryPolicy) -> str:
    """Return a retry policy in words."""
    if policy.kind == "fixed":
        words = "after " + ", ".join(map(brief, policy.delays)) if policy.delays else "never"
    elif policy.kind == "exponential":
        words = f"after {brief(policy.base)}, × {policy.factor:g} each time, at most {brief(policy.cap)}"
    else:
        words = f"as {getattr(policy.chooser, '__qualname__', 'a function')} says"
    for word, errors in (("on", policy.retried), ("never", policy.refused)):
        if errors not in ((), (BaseException,)):
            words += f", {word} {', '.join(error.__name__ for error in errors)}"
    return words if policy.max_attempts is None else f"{words}, {policy.max_attempts} attempts"
