"""How long one statement of a page may take, in milliseconds. A page without an answer by then does without it."""

# The rows of a list: with the nearest rows and the counts beside them, the list is there in about half a second.
ROWS = 200
# Counts and offers beside the rows, which a page can do without.
BESIDE = 200
# A panel, or a page that is read as a whole.
PAGE = 1000
# The count before a question: how many messages begin, and what a restore would find.
COUNT = 5000
# What a user asked for and waits for: the exact count, the action on a few messages, the longer search, the export.
LONG = 15_000
