"""Interfaces of other runtimes, under their own paths: a script puts `dougong.compat.` before its import."""
