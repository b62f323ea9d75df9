"""Training frameworks: what makes their own loops use the channel, by seams that they have. No file of theirs is edited."""
