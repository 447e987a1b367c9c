"""The data loader: sample order, latent shards, batches and prefetch."""
