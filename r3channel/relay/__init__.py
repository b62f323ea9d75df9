"""The rollout manager's side: frames in, exact shards out."""
