"""Windows and their state: tables, panes, firing, and the variants that fill them."""
