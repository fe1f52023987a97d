"""The arithmetic of DiffusionNFT: draws, sampler, advantages, objective and forward plan. No I/O, no Ray, no model."""
