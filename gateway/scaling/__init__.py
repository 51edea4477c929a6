"""How many expert workers there should be, and who asks for them."""
