"""A database of a vendor that cannot keep messages, as Django sees it: SQLite under another name."""
