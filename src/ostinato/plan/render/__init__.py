"""Plans and their errors as text."""
