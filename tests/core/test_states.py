"""The table of moves agrees with its drawing."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent

from django_delayq.core import states
from django_delayq.core.states import FINAL, LIVE, MOVES, REQUEUEABLE, State, is_legal

README = Path(__file__).parents[2] / "README.rst"

# The states in which the arrows of the drawing begin. The states in which they end are read from it.
BEGINNINGS: dict[str, set[State | None]] = {
    "schedule": {None},
    "cancel": {State.SCHEDULED},
    "claim": {State.SCHEDULED},
    "expires": {State.SCHEDULED},
    "ok": {State.RUNNING},
    "given up": {State.RUNNING},
    "retry": {State.RUNNING},
    "requeue": {State.DEAD, State.EXPIRED, State.CANCELLED},
}
# Moves that the drawing leaves out, because they would crowd it.
NOT_DRAWN = {
    (State.SCHEDULED, State.SCHEDULED),
    (State.SCHEDULED, State.DEAD),
    (State.SCHEDULED, State.CONSUMED),
    (State.RUNNING, State.CANCELLED),
    (State.RUNNING, State.RUNNING),
}


def drawing() -> list[str]:
    text = (states.__doc__ or "").split("::\n", 1)[1]
    return dedent(text.strip("\n")).rstrip().splitlines()


def arrows(lines: list[str]) -> dict[str, State]:
    """Return label → the state that its arrow points to."""
    found = {}
    for line in lines:
        for label, target in re.findall(r"(\w[\w ]*?) [┌├─]+► ?(\w+)", line):
            found[label] = State(target)
        turn = re.search(r"└─+ (\w+)[^└]* ─+┘", line)
        if turn:
            found[turn[1]] = above(lines, line.index("└"))
    return found


def above(lines: list[str], column: int) -> State:
    """Return the state over the ▲ of a column."""
    head = next(number for number, line in enumerate(lines) if line[column : column + 1] == "▲")
    words = re.finditer(r"\w+", lines[head - 1])
    return State(next(word[0] for word in words if word.start() <= column < word.end()))


def drawn() -> set[tuple[State | None, State]]:
    return {(before, after) for label, after in arrows(drawing()).items() for before in BEGINNINGS[label]}


def test_every_arrow_of_the_drawing_is_a_move_of_the_table() -> None:
    assert arrows(drawing()).keys() == BEGINNINGS.keys()
    assert drawn() <= MOVES.keys()


def test_every_move_of_the_table_is_drawn_or_listed_as_not_drawn() -> None:
    assert drawn() | NOT_DRAWN == MOVES.keys()
    assert not drawn() & NOT_DRAWN


def test_the_readme_has_the_same_drawing() -> None:
    ours = "\n".join(drawing())
    readme = README.read_text(encoding="utf-8")
    block = next(block for block in blocks(readme) if "──►" in block)
    assert block == ours


def blocks(text: str) -> list[str]:
    """Return the indented blocks of a text."""
    indented = re.findall(r"(?:^[ \t]+\S.*\n(?:[ \t]*\n(?=[ \t]+\S))?)+", text, re.MULTILINE)
    return [dedent(block).strip("\n").rstrip() for block in indented]


def test_a_state_is_live_or_final_and_only_unconsumed_messages_come_back() -> None:
    assert set(State) == LIVE | FINAL
    assert not LIVE & FINAL
    assert {before for before, _after in MOVES if before in FINAL} | {State.CONSUMED} == FINAL
    assert {before for before, after in MOVES if before in FINAL and after in LIVE} == REQUEUEABLE


def test_nothing_ever_leaves_consumed() -> None:
    assert not any(is_legal(State.CONSUMED, after) for after in State)
