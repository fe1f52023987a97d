"""The engine: one Ray placement group, one actor per rank, one imperative loop. The driver's side needs no torch."""
