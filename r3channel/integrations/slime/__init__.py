"""slime: its arguments, its seams, its actors with the channel in them."""
