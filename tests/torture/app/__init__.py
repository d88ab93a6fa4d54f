"""The app whose handlers the torture runs."""
