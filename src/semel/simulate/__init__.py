"""A whole broker under a simulated clock, network and disk, from a seed; a small scope of it exhaustively."""
