"""Which samples a batch has, and where a run is. Pure."""
