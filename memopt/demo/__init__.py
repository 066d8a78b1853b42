"""`memopt demo`: real networks learn real digits, of stock layers and of memopt layers."""
