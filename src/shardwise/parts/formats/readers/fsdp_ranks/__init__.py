"""Reads the files that verl and other trainers save on each FSDP rank."""
