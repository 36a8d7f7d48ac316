"""What users add to the kernel. Parts reach it through the ports."""
