"""A PostgreSQL server whose disk a test fills up, by a library that is compiled for it and needs no rights."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from testproject.servers import PostgresServer

SOURCE = Path(__file__).with_suffix(".c")


def find_compiler() -> str | None:
    return shutil.which("cc")


class FillablePostgres(PostgresServer):
    """A server whose files cannot grow while its disk is full, as on a disk without a free block."""

    @property
    def _flag(self) -> Path:
        return self.directory / "disk-is-full"

    def _environment(self) -> dict[str, str]:
        library = self.directory / "full_disk.so"
        if not library.exists():
            compiler = find_compiler()
            assert compiler is not None
            subprocess.run([compiler, "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=True)
        return {**super()._environment(), "LD_PRELOAD": str(library), "FULL_DISK": str(self._flag)}

    def fill(self) -> None:
        self._flag.touch()

    def answers(self) -> bool:
        return self._answers()

    def empty(self) -> None:
        self._flag.unlink(missing_ok=True)
