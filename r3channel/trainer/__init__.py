"""The trainer's side: exact shards in, replayed routers out."""
