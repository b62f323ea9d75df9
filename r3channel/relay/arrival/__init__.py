"""From an engine's answer to verified rows at rest."""
