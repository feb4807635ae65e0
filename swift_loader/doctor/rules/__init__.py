"""What follows from the facts. Pure: each module turns `Evidence` into findings, and touches nothing."""
