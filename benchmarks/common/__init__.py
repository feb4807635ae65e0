"""What several benchmarks use: datasets, charts and reports."""
