"""Where time and bytes go: clocks, metrics, pages and traces."""
