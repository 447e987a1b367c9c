"""Training on a Cloud TPU slice, by gcloud."""
