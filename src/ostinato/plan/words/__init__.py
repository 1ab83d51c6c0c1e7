"""Plans and their errors in words."""
