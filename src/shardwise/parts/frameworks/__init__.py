"""Bind the models and optimizers of frameworks, by the port of bindings."""
