"""Faults at every boundary to the outside: all of them by ``python -m tests.faults``, the most telling as tests."""
