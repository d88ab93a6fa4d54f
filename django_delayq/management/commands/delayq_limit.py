"""``manage.py delayq_limit``: override limits, reset them, and list the overrides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.core.management.base import CommandParser

from ... import signals
from ...api import limiting
from ...models import LimitOverride, Message
from ...record.sql.moves import writing
from .. import _common as common


class Command(common.DelayqCommand):
    help = (
        "Override the limit of a topic, of one limit key of a topic, or of a queue, in all workers; or reset it to "
        "what the code declares. What is not given stays as declared. With --limit 0 nothing begins. Workers begin "
        "nothing by the former limit once the command has ended. The override ends with reset, or by itself with "
        "--until. Workers of version 0.9.0 know no overrides."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("action", choices=("override", "reset", "list"), metavar="ACTION", help="or reset, or list")
        parser.add_argument("--topic", help="the topic whose limit is meant")
        parser.add_argument(
            "--limit-key", help="the limit key of the topic; without it the override counts for each key"
        )
        parser.add_argument("--queue", help="the queue whose limit is meant")
        parser.add_argument("--limit", type=int, metavar="N", help="the number that may run at once; 0: nothing begins")
        parser.add_argument("--rate", help="the number that may begin in a time, e.g. 100/m")
        parser.add_argument("--burst", type=int, metavar="N", help="the number that may begin together")
        common.add_end(parser, "", "shown with the limit, and recorded with the action")
        common.add_json(parser)

    def work(self, using: str, options: dict[str, Any]) -> None:
        action, reason = options["action"], options["reason"]
        if action == "list":
            self._show(using, options, "No limit is overridden.", limiting.in_force(using))
            return
        name = limiting.name_of(**{what: options[what] for what in ("topic", "limit_key", "queue")})
        # The action and its audit, or neither.
        with writing(using):
            if action == "override":
                done, text = True, self._override(using, name, options)
            else:
                done = limiting.reset(using, name)
                text = "reset to what the code declares" if done else "was not overridden"
            if done:
                signals.emit_action(Message, using, action, name, reason=reason)
        self._show(using, options, f"{name}: {text}")

    @staticmethod
    def _override(using: str, name: str, options: dict[str, Any]) -> str:
        terms = {what: options[what] for what in ("limit", "rate", "burst", "reason")}
        return limiting.described(limiting.override(using, name, **terms, **common.end_of(options)))

    def _show(
        self, using: str, options: dict[str, Any], text: str, found: Mapping[str, LimitOverride] | None = None
    ) -> None:
        if options["json"]:
            rows = limiting.in_force(using) if found is None else found
            self.say_json(database=using, overrides=[limiting.facts(row) for row in rows.values()])
            return
        for name, row in (found or {}).items():
            self.say(f"{name}: {limiting.described(row)}")
        if not found:
            self.say(text)
