"""Short programs that are no neural networks: on one rank, simulated ranks or real ones."""
