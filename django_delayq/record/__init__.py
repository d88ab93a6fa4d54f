"""The record: messages in the database, and the only code that changes their states."""
