"""From the user's words to numbers and names: what templates read, decided once."""
