"""Operations: a bulk action, restore or check that a worker does in steps. It outlives page, web server and worker."""

from __future__ import annotations

# Each of these adds its kind of work to ``WORKS``.
from . import bulk, consistency_check, restore_work  # noqa: F401
