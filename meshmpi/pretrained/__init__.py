"""Pretrained models: checkpoints of Hugging Face, read and written split over a mesh."""
