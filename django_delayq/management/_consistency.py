"""The part of ``delayq_check`` that compares the record with Redis."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError

from ..core.clock import iso
from ..inspector import consistency
from ..inspector.consistency import ConsistencyCheck, Mismatches
from ..restore.horizon import writable_server
from . import _common as common


def compare(command: common.DelayqCommand, using: str, options: dict[str, Any]) -> None:
    """Compare all queues, or those of --queue, and repair them with --fix. Raise ``CommandError`` for problems."""
    broker = common.required_broker(using)
    found: dict[str, Mismatches] = {}
    try:
        writable_server(broker)
        for queue in options["queue"]:
            if not consistency.is_known(using, broker, queue):
                raise CommandError(
                    f"There is no queue {queue}: neither the record nor Redis has a message to deliver in it, "
                    "and no setting or handler names it.",
                    returncode=common.USAGE,
                )
        for queue in options["queue"] or consistency.queues(using, broker):
            found[queue] = ConsistencyCheck(using, broker, queue, fix=options["fix"]).run()
    finally:
        broker.close()
    stuck = consistency.stuck(using, options["queue"])
    if options["json"]:
        command.say_json(
            database=using,
            fixed=options["fix"],
            queues={name: _plain(one) for name, one in found.items()},
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


def _say(command: common.DelayqCommand, found: dict[str, Mismatches], stuck: consistency.Stuck) -> None:
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


def _plain(one: Mismatches) -> dict[str, Any]:
    return {
        "compared": one.compared,
        "fixed": one.fixed,
        **{str(mismatch): number for mismatch, number in one.counts.items()},
        "examples": {str(mismatch): ids for mismatch, ids in one.examples.items()},
    }
