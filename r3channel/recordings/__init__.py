"""Steps on disk: recorded as a relay sealed them, read, compared, replayed and judged."""
