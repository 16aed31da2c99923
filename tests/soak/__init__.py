"""Long trials of what must survive: kills, damaged files, failing disks, faults, signals, hosts."""
