"""The durable, ordered, group-committed journal that every change of state is stored in.

`chain` reads it, `generation` continues it after a start or a failure, `writer` writes it, `snapshot` keeps
the state that replay begins with, `check` examines and repairs it. `docs/design/journal.md` is the design.
"""
