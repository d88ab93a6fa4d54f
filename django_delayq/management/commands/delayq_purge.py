"""``manage.py delayq_purge``: delete finished messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.db.models import QuerySet

from ... import durations, purge
from ...models import Message
from ...states import FINAL, State
from .. import _common as common


class Command(common.DelayqCommand):
    help = (
        "Delete messages that finished some time ago, with their log, in batches. Scheduled and running messages are "
        "never deleted. The janitor of a worker prunes by itself what is older than DELAYQ['RETENTION']."
    )
    exits = (0, 1, 2, 69, 78, 130)

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--older-than",
            type=common.duration,
            required=True,
            help="delete messages that finished longer ago than this, e.g. 30d",
        )
        parser.add_argument(
            "--state",
            action="append",
            choices=sorted(state.value for state in FINAL),
            default=[],
            help="only messages in this state (repeatable; default: all finished states, dead included)",
        )
        common.add_queue_and_topic(parser)
        parser.add_argument("--dry-run", action="store_true", help="show how many would be deleted, and write nothing")
        parser.add_argument(
            "--batch-size",
            type=common.positive,
            default=purge.PURGED_PER_TRANSACTION,
            help=f"messages per transaction (default {purge.PURGED_PER_TRANSACTION})",
        )
        common.add_yes(parser)
        common.add_json(parser)

    def work(self, using: str, options: dict[str, Any]) -> None:
        states = [State(state) for state in options["state"]] or sorted(FINAL)
        queues, topics = sorted(set(options["queue"])), sorted(set(options["topic"]))
        doomed = purge.finished(using, states, options["older_than"], queues=queues, topics=topics)
        target = _in_words(states, queues, topics, options["older_than"])
        if options["dry_run"]:
            self._say(using, purge.deletable(doomed).count(), doomed, options)
            return
        # With --yes nobody reads the number, and on a large table counting takes longer than many batches.
        total = None if options["yes"] else purge.deletable(doomed).count()
        if total:
            self.confirm(f"This will delete {common.messages(total)}: {target}.", yes=False)
        deleted = 0
        with common.Interruptible() as interruption:
            for size in purge.purge(doomed, limit=total, batch_size=options["batch_size"]):
                deleted += size
                if interruption.asked():
                    break
        self.record_action(using, "purge", target, outcomes={"purged": deleted})
        self._say(using, deleted, doomed, options)
        if interruption.asked():
            raise CommandError(
                "Interrupted between two batches. Run the command again to go on.", returncode=interruption.returncode
            )

    def _say(self, using: str, number: int, doomed: QuerySet[Message], options: dict[str, Any]) -> None:
        for name, ids in purge.referred_to(doomed).items():
            self.stderr.write(f"{purge.passed_over(name, ids)}.", self.style.WARNING)
        if options["json"]:
            self.say_json(database=using, dry_run=options["dry_run"], deleted=number)
        else:
            self.say(f"{'Would delete' if options['dry_run'] else 'Deleted'} {common.messages(number, 'finished')}.")


def _in_words(states: Sequence[str], queues: Sequence[str], topics: Sequence[str], older_than: float) -> str:
    """Describe the messages in words, for the question and the audit."""
    where = [f"queue {' or '.join(queues)}"] if queues else []
    where += [f"topic {' or '.join(topics)}"] if topics else []
    age = f"finished more than {durations.brief(older_than)} ago" if older_than else "finished by now"
    return ", ".join([", ".join(states), *where, age])
