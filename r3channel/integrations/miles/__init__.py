"""miles: rows of a step go from its rollout manager to its trainers over the channel."""
