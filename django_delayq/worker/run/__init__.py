"""Runs handlers, and records their outcomes."""
