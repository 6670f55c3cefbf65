"""Deterministic fault search: small runs of the machines under adversarial timing and faults, checked after every event."""
