"""The app whose handlers are tortured."""
