"""What lies on a node: its directories, records, runs, trainers and agent, found by files alone."""
