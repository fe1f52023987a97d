"""A run as one page: what its files say, a verdict with its noise, curves, samples, time, profile and identity.

Reads run folders and writes one self-contained HTML file. Imports neither torch nor Ray; asks no network for anything.
"""
