"""kvgen inside other libraries, as far as it goes without them: the libraries' side is recorded or imitated."""
