"""Reports: where the time of saves and loads went, as a page, as a trace, and as values."""
