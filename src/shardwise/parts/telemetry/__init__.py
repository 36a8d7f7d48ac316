"""Telemetry: what each rank did in an operation, gathered in one table and stored."""
