"""What a training run learns, one task a file: `base` says what a task is, `registry` names them.

A task knows its data, its graph and its measures; the loop, checkpoints and metrics know only what
a task is.
"""
