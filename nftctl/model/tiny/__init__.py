"""The digits: a tiny Cosmos3-family base that draws coloured handwritten digits, and how it was made."""
