"""What clip_score, pickscore and aesthetic share: a CLIP model from a local folder or the hub."""
