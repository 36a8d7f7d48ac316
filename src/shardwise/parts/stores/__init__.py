"""Stores on other machines."""
