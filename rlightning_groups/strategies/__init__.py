"""The strategy: its logic once, and one thin class per Lightning namespace."""
