"""Who moves which bytes from where to where: lists in, lists out; no I/O, no communication."""
