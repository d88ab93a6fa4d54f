"""What the package's functions do: schedule, cancel, reschedule, pause."""
