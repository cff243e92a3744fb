"""The transaction coordinator: who may write under a transactional id, and how a transaction ends.

`docs/design/transactions.md` is the design.
"""
