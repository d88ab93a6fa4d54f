"""Shows a block of lines again and again: in place on a terminal, one block after another elsewhere."""

from __future__ import annotations

import contextlib
import select
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

from django.core.management.base import OutputWrapper

# The time between two checks whether the user wants to end the screen. Seconds.
_CHECK_INTERVAL = 0.1


class Screen:
    """Shows blocks of lines on a stream."""

    def __init__(self, stream: OutputWrapper) -> None:
        self._stream = stream
        self._drawn = False
        self.is_terminal = stream.isatty()

    def show(self, lines: Sequence[str]) -> None:
        """Show the next block. On a terminal it replaces the block before, and is cut to the size of the terminal."""
        if not self.is_terminal:
            self._stream.write("\n".join([*([""] if self._drawn else []), *lines]))
        else:
            columns, rows = shutil.get_terminal_size()
            home = "\x1b[H" if self._drawn else "\x1b[2J\x1b[H"
            shown = "\x1b[K\r\n".join(line[: columns - 1] for line in lines[: rows - 1])
            self._stream.write(f"{home}{shown}\x1b[K\x1b[J", ending="")
        self._stream.flush()
        self._drawn = True

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """On a terminal, hide the cursor and read keys as they are pressed."""
        with _keys(sys.stdin) if self.is_terminal else contextlib.nullcontext():
            if self.is_terminal:
                self._stream.write("\x1b[?25l", ending="")
            try:
                yield
            finally:
                if self.is_terminal:
                    self._stream.write("\x1b[?25h\n", ending="")
                    self._stream.flush()

    def wait(self, seconds: float, ended: Callable[[], bool]) -> bool:
        """Wait. Return True as soon as the user wants to end the screen, by a signal (``ended``) or the key q."""
        deadline = time.monotonic() + seconds
        while not ended():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            if self._pressed(min(_CHECK_INTERVAL, left)):
                return True
        return True

    def _pressed(self, seconds: float) -> bool:
        if not (self.is_terminal and sys.stdin.isatty()):
            time.sleep(seconds)
            return False
        if not select.select([sys.stdin], [], [], seconds)[0]:
            return False
        # An empty answer means that the terminal is gone.
        return sys.stdin.read(1) in ("q", "Q", "")


@contextlib.contextmanager
def _keys(stdin: TextIO) -> Iterator[None]:
    """Read keys without waiting for the end of a line, where the system can do that."""
    try:
        import termios
        import tty
    except ImportError:
        yield
        return
    if not stdin.isatty():
        yield
        return
    before: list[Any] = termios.tcgetattr(stdin)
    tty.setcbreak(stdin)
    try:
        yield
    finally:
        termios.tcsetattr(stdin, termios.TCSADRAIN, before)
