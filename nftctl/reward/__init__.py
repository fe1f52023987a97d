"""Rewards over HTTP: the protocol as values, a client that never guesses a score, a server, and the packaged scorers.

Importing this package imports nothing else; `client` and `server` bring aiohttp, so commands import them late.
"""
