"""``manage.py delayq_show``: show a message and its log."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.db.models import Model

from ...core.clock import iso
from ...core.text import visible
from ...models import Message, Transition
from .. import _common as common

# Columns whose facts the log shows as well.
_OF_THE_LOG = {"created_by", "claimed_at", "ready_at", "claimed_by", "consumed_by"}


class Command(common.DelayqCommand):
    help = "Show a message with its payload, which no mask covers, and its log."

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("id", type=common.message_id, metavar="ID", help="the id of a message")
        common.add_json(parser)

    def work(self, using: str, options: dict[str, Any]) -> None:
        message = Message.objects.using(using).filter(pk=options["id"]).first()
        if message is None:
            raise CommandError(f"There is no message {options['id']}.")
        facts = {name: value for name, value in _facts(message).items() if name not in _OF_THE_LOG}
        moves = Transition.objects.using(using).filter(message_id=message.pk).order_by("number")
        log = [{name: value for name, value in _facts(move).items() if name != "message_id"} for move in moves]
        if options["json"]:
            self.say_json(database=using, message=facts, log=log)
            return
        for name, value in facts.items():
            if value not in (None, "", {}):
                text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
                self.say(f"{name}: {visible(text)}")
        for move in log:
            self.say("")
            path = f"{move['from_state']} > {move['to_state']}" if move["from_state"] else move["to_state"]
            self.say(f"{move['number']}. {move['at']} {path}, by {move['actor']}, due at {move['due_at']}")
            for text in filter(None, (move["reason"], move["error"], move["traceback"])):
                self.say("\n".join(f"   {visible(line)}" for line in text.splitlines()))


def _facts(row: Model) -> dict[str, Any]:
    """Return the columns of a row, with its times as text."""
    values = {field.attname: getattr(row, field.attname) for field in row._meta.concrete_fields}
    return {name: iso(value) if isinstance(value, datetime) else value for name, value in values.items()}
