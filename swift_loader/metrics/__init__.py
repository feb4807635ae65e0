"""What is measured of a loader's batches, always."""
