"""Decisions: which samples go where, and which rows and layers each rank receives. Pure, deterministic, numpy only."""
