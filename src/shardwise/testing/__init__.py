"""The conformance suites of the ports, for packages that extend shardwise.

Each suite is a class in a module of its own, such as `shardwise.testing.store_suite`.
"""
