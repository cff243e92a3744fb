"""The generator of `semel.wire.messages`: notation in, typed Python out."""
