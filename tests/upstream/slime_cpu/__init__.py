"""slime's own loop on a machine without a GPU: its script, its actors, a real SGLang server; nothing of theirs is edited."""
