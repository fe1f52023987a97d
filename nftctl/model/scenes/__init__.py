"""The embedded base that draws coloured shapes as counted and placed by its prompt: words, drawing, recipe, weights."""
