"""What this machine does, measured: the description that predictions of time start from."""
