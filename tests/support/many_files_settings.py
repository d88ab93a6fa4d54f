"""The settings of ``tests.support.worker_settings``, in a process that has more files open than ``select`` can name."""

from __future__ import annotations

import os
import resource

from tests.support.worker_settings import *  # noqa: F403

MANY = 1100

_soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (4 * MANY, _hard))
_kept = [os.open(os.devnull, os.O_RDONLY) for _ in range(MANY)]
