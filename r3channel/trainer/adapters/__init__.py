"""The frameworks whose routers replay: one adapter each."""
