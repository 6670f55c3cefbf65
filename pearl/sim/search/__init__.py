"""Deterministic fault search: small runs of the machines under adversarial timing, checked after every event."""
