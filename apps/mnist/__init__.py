"""Handwritten digits by a small convolutional network, split in the batch and both image dims."""
