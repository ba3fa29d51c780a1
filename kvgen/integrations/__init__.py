"""kvgen inside other libraries, one room each; none of them is a dependency of kvgen."""
