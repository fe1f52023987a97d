"""nftctl: DiffusionNFT post-training of flow-matching generators, from a typed profile to a checkpoint you can resume."""

__version__ = "0.1.0"
