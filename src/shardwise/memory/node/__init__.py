"""What lies on a node: its directories, notes, runs, trainers and agent, found by files alone."""
