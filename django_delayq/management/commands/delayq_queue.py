"""``manage.py delayq_queue``: pause and resume queues."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from ... import signals
from ...api import pausing
from ...core.clock import iso
from ...core.verbs import VERBS
from ...models import Message
from ...record.sql.moves import writing
from .. import _common as common


class Command(common.DelayqCommand):
    help = (
        "Pause queues, or resume paused ones. When pause has ended, no worker starts a message of these queues any "
        "more. Running messages go on; messages that fall due wait. The pause ends with resume, or by itself with "
        "--until. A queue that is paused already gets the new end and reason. After resume, workers start messages of "
        "these queues again within about a second. A queue that nothing knows yet can be paused; if its name is like "
        "a known one, the command asks first, or needs --yes."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        verbs = [verb.name for verb in VERBS.values() if verb.model == "queue"]
        parser.add_argument("action", choices=verbs, metavar="ACTION", help=" or ".join(verbs))
        parser.add_argument("queues", nargs="+", type=common.queue_name, metavar="QUEUE", help="the names of queues")
        common.add_end(parser, "pause: ", "shown with the queue, and recorded with the action")
        common.add_yes(parser)
        common.add_json(parser)

    def work(self, using: str, options: dict[str, Any]) -> None:
        names, is_pause = sorted(set(options["queues"])), options["action"] == "pause"
        if not is_pause and options["until"] is not None:
            raise common.wrong_usage("--until belongs to pause.")
        # A resume is for paused queues only.
        meant = None if is_pause else {*pausing.paused(using)}
        self.ask_about_queues(using, names, yes=options["yes"], meant=meant)
        act, done = _pause if is_pause else _resume, {}
        for name in names:
            # The action and its audit, or neither.
            with writing(using):
                done[name] = act(using, name, options)
        if options["json"]:
            self.say_json(database=using, **{"paused_until" if is_pause else "resumed": done})
            return
        for name, found in done.items():
            if is_pause:
                self.say(f"{name}: paused until {found or 'it is resumed'}")
            else:
                self.say(f"{name}: {'resumed' if found else 'was not paused'}")


def _pause(using: str, name: str, options: dict[str, Any]) -> str | None:
    """Pause a queue, and return when the pause ends; None: when it is resumed."""
    queue = pausing.pause(using, name, **common.end_of(options), reason=options["reason"])
    signals.emit_action(Message, using, "pause", name, reason=options["reason"])
    return iso(queue.resumes_at)


def _resume(using: str, name: str, options: dict[str, Any]) -> bool:
    """Resume a queue, and return whether it was paused."""
    was_paused = pausing.resume(using, name)
    if was_paused:
        signals.emit_action(Message, using, "resume", name, reason=options["reason"])
    return was_paused
