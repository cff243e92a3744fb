"""The shell around the core: sockets, files, threads, clocks."""
