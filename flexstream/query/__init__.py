"""What is asked: expressions, windows, aggregates, and the plan that they make."""
