"""What the SQL sinks have in common: the sink's row, two strategies, columns. Databases bring a `Dialect`."""
