"""What the loop is compared with, and nothing to copy: the stock way, the demo's audit, the benchmark's timed loop."""
