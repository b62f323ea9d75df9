"""Frames that every later release of wire version 2 must decode, and one of version 1, which it must refuse by name.

Never regenerate the files of a released wire version.
"""
