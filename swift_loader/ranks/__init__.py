"""Which rank this process is, and whether all ranks agree."""
