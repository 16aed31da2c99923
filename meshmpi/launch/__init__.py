"""Starting ranks, and what becomes of them."""
