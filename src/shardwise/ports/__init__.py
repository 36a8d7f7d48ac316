"""The interfaces between the kernel and its parts, also for packages of others."""
