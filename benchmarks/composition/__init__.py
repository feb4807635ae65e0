"""What the benchmarks of batch composition share: lengths of public samples, and ways to make batches of them."""
