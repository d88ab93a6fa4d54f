from __future__ import annotations

import re
import sys
from io import BytesIO, StringIO, TextIOWrapper
from typing import Any

import pytest
from django.core.management import call_command

from django_delayq import RetryPolicy, handler
from django_delayq.api.actions import ACTIONS
from django_delayq.core.states import State
from django_delayq.management import _common as common
from django_delayq.models import Message
from django_delayq.project.registry import Delivered
from tests.support.commands import held, run, schedule

pytestmark = pytest.mark.django_db(transaction=True)


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_data_goes_to_stdout_and_nothing_to_a_terminal_beside_it() -> None:
    schedule(30)
    out, err = StringIO(), Terminal()
    call_command("delayq_restore", "--json", stdout=out, stderr=err, no_color=True)
    assert err.getvalue() == ""
    assert out.getvalue().startswith("{")
    assert out.getvalue().count("\n") == 1


@pytest.mark.parametrize(("answer", "state"), [("y\n", State.DEAD), ("n\n", State.SCHEDULED), ("", State.SCHEDULED)])
def test_a_command_asks_for_confirmation_on_a_terminal(
    answer: str, state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    [pk] = schedule(1, due=-20)
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    ran = run("delayq_restore", "--json", "--overdue", "dead")
    assert "[y/N]" in ran.err
    assert ran.code == (0 if state == State.DEAD else 1)
    assert Message.objects.get(pk=pk).state == state
    assert held() == {}


def measure(message: Delivered) -> None:
    pass


def in_ascii(*words: str) -> str:
    """Call a command whose output has ASCII only, and return that."""
    out = TextIOWrapper(said := BytesIO(), encoding="ascii", write_through=True)
    call_command(*words, stdout=out, no_color=True)
    return said.getvalue().decode("ascii")


def test_an_output_that_has_ascii_only_gets_every_line() -> None:
    measure.__qualname__ = "größe"
    handler("t.ascii", retry=RetryPolicy.exponential("10s"))(measure)
    found = in_ascii("delayq_check", "handlers")
    (line,) = [line for line in found.splitlines() if "t.ascii" in line]
    assert "gr\\xf6\\xdfe" in line
    assert "after 10.0 s, x 2 each time" in line


@pytest.mark.console
def test_the_bars_of_what_falls_due_are_there_in_ascii_too() -> None:
    schedule(3)
    assert re.search(r"\d\d:\d\d  #+ +3\n", in_ascii("delayq_stats"))


@pytest.mark.parametrize(
    "command",
    [["restore"], ["stats"], ["check"], ["queue"], ["recurring"], ["act"], *(["act", verb] for verb in ACTIONS)],
    ids=" ".join,
)
def test_the_help_lists_the_exit_codes(command: list[str], capsys: Any) -> None:
    with pytest.raises(SystemExit):
        call_command(f"delayq_{command[0]}", *command[1:], "--help")
    text = " ".join(capsys.readouterr().out.split())
    assert "Exit codes: 0 done" in text
    assert f"{common.UNREACHABLE} Redis or the database" in text
