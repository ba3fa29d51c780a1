"""Where an element lives: axes, regions, element types, and the memory of a cache made of them."""
