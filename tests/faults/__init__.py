"""Faults at every boundary of the process: ``python -m tests.faults`` runs all of them; the tests run a few."""
