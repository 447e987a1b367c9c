"""The describe stage: values of each picture, such as hashes, embeddings and scores."""
