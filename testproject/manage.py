#!/usr/bin/env python
"""Django's command line for the demo shop. It works from any folder, with the package installed or not."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main() -> None:
    """Run a management command."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "testproject.settings")
    from django.core.management import execute_from_command_line

    execute_from_command_line(sys.argv)


if __name__ == "__main__":
    main()
