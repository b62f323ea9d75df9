"""Frames that every later version must decode. Never regenerate the files of a released wire version."""
