"""The loops of a Transformer step and its matrix products, in meshmpi, NumPy, C, PyTorch and JAX.

`data` has inputs and right answers, one module each implementation, `worker` times one of them.
"""
