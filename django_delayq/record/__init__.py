"""The record: messages in the database, and the only moves of their states."""
