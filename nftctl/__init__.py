"""nftctl: DiffusionNFT post-training of flow-matching generators, from a typed profile to a checkpoint."""

__version__ = "0.1.0"
