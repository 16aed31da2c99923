"""What watches a job: flight recorder, watchdog, deadlocks, recovery."""
