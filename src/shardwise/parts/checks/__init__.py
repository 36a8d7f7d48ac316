"""What runs only when somebody asks for it: verify, compare, and explain what does not fit."""
