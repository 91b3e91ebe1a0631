"""What goes over the line: frames, and the blocks that staged rows travel in."""
