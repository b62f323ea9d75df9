"""A complete asynchronous GRPO loop on real parts; see train_async.py."""
