"""An honest comparison of ways to learn on one small base: what `nftctl bench learning` runs. No Ray, no services."""
