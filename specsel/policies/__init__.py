"""Choice rules and their catalogue."""
