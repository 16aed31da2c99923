"""Training: data, configuration, checkpoints, metrics, the loop and decoding.

Of all rooms this one comes last: nothing else may import it.
"""
