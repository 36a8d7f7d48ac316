"""Plans: which rank moves which bytes. Functions over lists, without I/O or communication."""
