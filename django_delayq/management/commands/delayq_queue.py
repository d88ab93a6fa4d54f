"""``manage.py delayq_queue``: pause and resume queues."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from ... import signals
from ...api import pausing
from ...core.clock import iso
from ...core.verbs import VERBS
from ...models import Message
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
        names = sorted(set(options["queues"]))
        if options["action"] == "resume" and options["until"] is not None:
            raise common.wrong_usage("--until belongs to pause.")
        # A resume can only mean a queue that is paused.
        meant = None if options["action"] == "pause" else {*pausing.paused(using)}
        self.ask_about_queues(using, names, yes=options["yes"], meant=meant)
        if options["action"] == "pause":
            self._pause(using, names, options)
        else:
            self._resume(using, names, options)

    def _pause(self, using: str, names: list[str], options: dict[str, Any]) -> None:
        paused = {}
        for name in names:
            queue = pausing.pause(using, name, **common.end_of(options), reason=options["reason"])
            signals.emit_action(Message, using, "pause", name, reason=options["reason"])
            paused[name] = iso(queue.resumes_at)
        if options["json"]:
            self.say_json(database=using, paused_until=paused)
            return
        for name, at in paused.items():
            self.say(f"{name}: paused until {at or 'it is resumed'}")

    def _resume(self, using: str, names: list[str], options: dict[str, Any]) -> None:
        resumed = {}
        for name in names:
            resumed[name] = pausing.resume(using, name)
            if resumed[name]:
                signals.emit_action(Message, using, "resume", name, reason=options["reason"])
        if options["json"]:
            self.say_json(database=using, resumed=resumed)
            return
        for name, was_paused in resumed.items():
            self.say(f"{name}: {'resumed' if was_paused else 'was not paused'}")
