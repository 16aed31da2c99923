"""The guard of a job: flight recorder, watchdog, deadlock detection, recovery."""
