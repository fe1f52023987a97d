"""What a run leaves on disk: its folder, its identity, its checkpoints and the proof that they are whole.

Imports neither torch nor Ray, so a checkpoint can be inspected on any machine. Unpickles nothing.
"""
