"""A Vision Transformer on MNIST, trained by `mm.fit`."""
