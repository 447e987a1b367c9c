"""The encode stage: image shards to latent shards."""
