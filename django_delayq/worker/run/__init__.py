"""Runs handlers, and records and reports their outcomes."""
