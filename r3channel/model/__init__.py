"""The routing shape of a model: what its config says, and presets of models that are named."""
