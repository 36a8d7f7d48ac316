"""Decides which rank moves which bytes: functions over lists, without I/O or communication."""
