"""``manage.py delayq_purge``: delete finished messages."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError, CommandParser

from ... import durations, purge
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
        parser.add_argument("--dry-run", action="store_true", help="show how many would be deleted, and write nothing")
        parser.add_argument(
            "--batch-size",
            type=common.positive,
            default=purge.PURGED_PER_TRANSACTION,
            help=f"messages per transaction (default {purge.PURGED_PER_TRANSACTION})",
        )
        common.add_json(parser)

    def work(self, using: str, options: dict[str, Any]) -> None:
        states = [State(state) for state in options["state"]] or sorted(FINAL)
        older_than = options["older_than"]
        if options["dry_run"]:
            self._say(using, purge.finished(using, states, older_than).count(), options)
            return
        deleted = 0
        # The total is not counted first: on a large table that would take longer than many batches.
        bar = common.ProgressBar(self.stderr, 0, options["verbosity"])
        with common.Interruptible() as interruption:
            for size in purge.purge(using, states, older_than, batch_size=options["batch_size"]):
                deleted += size
                bar(size)
                if interruption.asked():
                    break
        bar.close()
        target = f"{', '.join(states)}, finished more than {durations.brief(older_than)} ago"
        self.record_action(using, "purge", target, outcomes={"purged": deleted})
        self._say(using, deleted, options)
        if interruption.asked():
            raise CommandError(
                "Interrupted between two batches. Run the command again to go on.", returncode=interruption.returncode
            )

    def _say(self, using: str, number: int, options: dict[str, Any]) -> None:
        if options["json"]:
            self.say_json(database=using, dry_run=options["dry_run"], deleted=number)
        else:
            self.say(f"{'Would delete' if options['dry_run'] else 'Deleted'} {common.messages(number, 'finished')}.")
