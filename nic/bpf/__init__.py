"""Programs in the kernel that stand in for a card's table."""
