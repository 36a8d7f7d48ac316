"""Everything around the kernel. Parts import the kernel, and it imports none of them."""
