"""The periodic services of a worker."""
