"""The training loop for any graph (`mm.fit`): metrics, checkpoints, signals, time limits, guards of numbers."""
