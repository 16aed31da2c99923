"""What a process reads and writes: private folders, the cache, files of others."""
