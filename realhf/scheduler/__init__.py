"""Place, watch and stop processes."""
