"""A run handed to a cluster: how many machines it needs, and the job as Slurm, Kubernetes or Ray's job server take it.

Owns texts and one HTTP client. Starts nothing on this machine, imports neither Ray nor torch, and refuses to put a
secret into a text.
"""
