"""Pages and blocks of the documentation that come from the code: `python -m docpages` writes them, a test compares them."""
