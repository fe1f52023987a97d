"""The command line: thin commands that import what they need when they run.

Nothing in this package imports torch, Ray or a web library at module level, so that help and completion stay fast.
"""
