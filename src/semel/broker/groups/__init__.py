"""Consumer groups: who is in them, what each member reads, and how far it has come."""
