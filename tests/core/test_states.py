"""The table of moves, and its drawing."""

from __future__ import annotations

from pathlib import Path

from django_delayq.core import states
from django_delayq.core.states import FINAL, LIVE, MOVES, REQUEUEABLE, State, is_legal

README = Path(__file__).parents[2] / "README.rst"


def test_the_readme_has_the_drawing_of_the_states() -> None:
    drawing = (states.__doc__ or "").split("::\n", 1)[1].strip("\n").rstrip()
    assert drawing in README.read_text(encoding="utf-8")


def test_a_state_is_live_or_final_and_only_unconsumed_messages_come_back() -> None:
    assert set(State) == LIVE | FINAL
    assert not LIVE & FINAL
    assert {before for before, _after in MOVES if before in FINAL} | {State.CONSUMED} == FINAL
    assert {before for before, after in MOVES if before in FINAL and after in LIVE} == REQUEUEABLE


def test_nothing_ever_leaves_consumed() -> None:
    assert not any(is_legal(State.CONSUMED, after) for after in State)
