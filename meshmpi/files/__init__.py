"""Files that a process reads and writes: private folders, the cache, untrusted files."""
